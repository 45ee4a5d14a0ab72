// Draws the figures of a run's report: line charts as SVG, maps as canvas with SVG axes, a read-out at the pointer. No library.
"use strict";
(() => {
const data = JSON.parse(document.getElementById("data").textContent);
const TOP = 65000, ZERO = 65533, BAD = 65534, NONE = 65535, BELOW = -99;
const MAPS = {
  sequential: "440154471063481f70472d7b4439834046883b528b365d8d31688e2c728e287c8e24868e21918c1f9a8a20a48628ae8035b77948c16e5ec96275d05490d743addc30c8e020e5e419fde725",
  signedLight: "0530611249842065ab327cb74393c36bacd190c4ddb1d5e7d1e5f0e4eef4f7f6f6fae9dffddbc7f8bfa4f3a481e48066d6604dc43b3cb1182b8a0b2567001f",
  signedDark: "9eb0ff82adf262a6e04497c63280a628688620526a173c4d11273211161b190c09260d013710004a150261200b7d341e964a36b06253ca7b71e59590ffadad",
};
const dark = window.matchMedia("(prefers-color-scheme: dark)");
const namespace = document.querySelector(".mark svg").namespaceURI;
const tip = document.getElementById("tip");
const variable = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// ---- numbers -------------------------------------------------------------------------------------------------------------------
function number(v) {
  if (v === 0) return "0";
  const size = Math.abs(v);
  if (size >= 1e6 || size < 1e-3) return v.toExponential(2).replace("e+", "e").replace(/\.?0+e/, "e").replace("-", "\u2212").replace("e-", "e\u2212");
  return String(Number(v.toPrecision(4))).replace("-", "\u2212");
}
function power(exponent) {
  if (exponent >= -3 && exponent <= 3) return String(Number((10 ** exponent).toPrecision(1)));
  return "10" + [...String(exponent)].map((c) => (c === "-" ? "\u207b" : "\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079"[c])).join("");
}
// At least three ticks, about `count` of them: [value, text].
function ticks(low, high, count) {
  let found = [];
  for (let n = count; found.length < 3 && n < count + 8; n++) found = evenTicks(low, high, n);
  return found;
}
function evenTicks(low, high, count) {
  const rough = (high - low) / count, base = 10 ** Math.floor(Math.log10(rough));
  const step = base * [1, 2, 5, 10].find((m) => m * base >= rough * 0.999), found = [];
  const places = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));  // the same number of decimals on all of them
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + 1e-9 * step; i++) {
    const v = i * step, plain = v && places <= 4 && Math.abs(v) < 1e6;
    found.push([v, plain ? v.toFixed(places).replace("-", "\u2212") : number(Number(v.toPrecision(10)))]);
  }
  return found;
}
// Ticks of an axis of so many pixels whose coordinate is log10 of the value: the densest usual set whose labels fit.
const along = (text) => 6.8 * text.length + 10, upward = () => 24;  // pixels that a label takes along its axis
function logTicks(low, high, length, size = along) {
  const inside = (at) => at >= low - 1e-9 && at <= high + 1e-9;
  const fits = (pairs) => pairs.length > 1 && pairs.every(([at, text], i) => !i || ((at - pairs[i - 1][0]) / (high - low)) * length >= (size(text) + size(pairs[i - 1][1])) / 2);
  const within = (digits) => {
    const found = [];
    for (let e = Math.floor(low); e <= high; e++) for (const m of digits) if (inside(e + Math.log10(m))) found.push([e + Math.log10(m), number(Number((m * 10 ** e).toPrecision(2)))]);
    return found;
  };
  for (const digits of [[1, 2, 5], [1, 3]]) if (fits(within(digits))) return within(digits);
  for (let every = 1; every <= high - low; every++) {
    const found = [];
    for (let e = Math.ceil(low - 1e-9); inside(e); e++) if (e % every === 0) found.push([e, power(e)]);
    if (fits(found)) return found;
  }
  const few = [[1, 2, 3, 5, 7], [2, 5], [1, 5]].map(within).find(fits);
  return few ?? ticks(10 ** low, 10 ** high, Math.max(1, Math.floor(length / 60))).map(([v, text]) => [Math.log10(v), text]);
}
const whole = (pairs) => pairs.filter(([v]) => Math.abs(v - Math.round(v)) < 1e-6);
const line = (low, high, from, to) => (v) => from + ((v - low) / (high - low || 1)) * (to - from);
const clamp = (v, low, high) => Math.min(high, Math.max(low, v));

// ---- SVG -----------------------------------------------------------------------------------------------------------------------
function draw(parent, tag, attributes, text) {
  const node = document.createElementNS(namespace, tag);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== undefined) node.textContent = text;
  parent.append(node);
  return node;
}
function fresh(panel, height, label) {
  panel.replaceChildren();
  panel.style.height = `${height}px`;
  const svg = draw(panel, "svg", { role: "img", "aria-label": label });
  return svg;
}
function label(svg, x, y, text, anchor = "middle", more = {}) {
  return draw(svg, "text", { x, y, "text-anchor": anchor, ...more }, text);
}
function bottomAxis(svg, pairs, x, left, right, y, title, slack = 3) {  // labels stay within the axis and so many pixels
  draw(svg, "line", { x1: left, x2: right, y1: y, y2: y, class: "axis" });
  let taken = -Infinity;  // a label that would run into the one before is left out, its tick stays
  for (const [v, text] of pairs) {
    const at = x(v), half = 3.4 * text.length, middle = clamp(at, left - slack + half, right + slack - half);
    draw(svg, "line", { x1: at, x2: at, y1: y, y2: y + 4, class: "axis" });
    if (middle - half - 2 < taken) continue;
    taken = middle + half + 2;
    label(svg, middle, y + 16, text);
  }
  label(svg, (left + right) / 2, y + 32, title);
}
function leftAxis(svg, pairs, y, x, right, title) {
  for (const [v, text] of pairs) {
    if (right !== undefined) draw(svg, "line", { x1: x, x2: right, y1: y(v), y2: y(v), class: "grid" });
    label(svg, x - 6, y(v) + 4, text, "end");
  }
  if (title) label(svg, x - 6, y.top - 8, title, "end");
}
const path = (points) => points.map(([x, y, start], i) => `${i === 0 || start ? "M" : "L"}${x.toFixed(1)} ${y.toFixed(1)}`).join("");

// ---- the read-out --------------------------------------------------------------------------------------------------------------
function readout(panel, find) {
  panel.onpointermove = panel.onpointerdown = (event) => {
    const box = panel.getBoundingClientRect(), text = find(event.clientX - box.left, event.clientY - box.top);
    tip.hidden = !text;
    if (!text) return;
    tip.textContent = text;
    const size = tip.getBoundingClientRect(), right = event.clientX + 14 + size.width < window.innerWidth;
    tip.style.left = `${Math.max(4, right ? event.clientX + 14 : event.clientX - 14 - size.width)}px`;
    tip.style.top = `${Math.max(4, event.clientY - 14 - size.height)}px`;
  };
  const leave = () => { tip.hidden = true; find(-1, -1); };
  panel.onpointerleave = (event) => { if (event.pointerType !== "touch") leave(); };  // a finger that lifts leaves the value standing
  panel.onpointercancel = leave;
}
function nearest(sorted, value) {
  let low = 0, high = sorted.length - 1;
  while (low < high) { const middle = (low + high) >> 1; if (sorted[middle] < value) low = middle + 1; else high = middle; }
  return low > 0 && value - sorted[low - 1] < sorted[low] - value ? low - 1 : low;
}

// ---- line charts ---------------------------------------------------------------------------------------------------------------
function levels(chart) {  // bounds in the coordinate that is drawn (log10 on a log scale)
  const log = chart.scale === "log", height = (v) => (log ? Math.log10(v) : v);
  const values = chart.series.flatMap((s) => s.y).filter((v) => !log || v > 0).map(height).sort((a, b) => a - b);
  if (!values.length) return { low: 0, high: 1, height };
  let low = values[0], high = values[values.length - 1];
  if (chart.lines.length) {  // the loss: spikes far above the start and the uniform baseline leave the frame
    const lines = chart.lines.map((l) => l.y), start = chart.series[0].y[0] ?? high;
    high = Math.min(high, 1.15 * Math.max(start, ...lines));
    low = Math.min(low, ...lines);
    high = Math.max(high, ...lines);
  } else if (chart.scale === "linear" && chart.id !== "loss") low = Math.min(low, 0);
  const pad = (high - low) * 0.05 || Math.abs(high) * 0.1 || 1;
  return { low: chart.scale === "linear" && low === 0 ? 0 : low - pad, high: high + pad, height };
}
function drawChart(panel) {
  const chart = data.charts.find((c) => c.id === panel.dataset.chart), wide = chart.id === "loss";
  const width = panel.clientWidth, height = wide ? 330 : 190, left = 48, right = width - (chart.lines.length ? 84 : 10), top = 10, bottom = height - 40;
  const svg = fresh(panel, height, chart.title), { low, high, height: z } = levels(chart);
  const steps = chart.series.flatMap((s) => [...s.x, ...s.bad]), first = Math.min(...steps), last = Math.max(...steps);
  const x = first === last ? () => (left + right) / 2 : line(first, last, left, right), y = line(low, high, bottom, top);
  const marks = chart.scale === "log" ? logTicks(low, high, bottom - top, upward) : ticks(low, high, wide ? 7 : 4);
  leftAxis(svg, marks, y, left, right);
  const few = Math.max(2, Math.floor((right - left) / 90));
  bottomAxis(svg, first === last ? [[first, String(first)]] : whole(ticks(first, last, few)), x, left, right, bottom, "optimizer step", 12);
  const names = chart.lines.map((l) => ({ ...l, at: y(z(l.y)) })).sort((a, b) => a.at - b.at);
  let above = -Infinity;
  for (const l of names) {
    draw(svg, "line", { x1: left, x2: right, y1: l.at, y2: l.at, class: "level" });
    above = Math.max(l.at + 4, above + 14);
    label(svg, right + 6, above, `${l.name} ${l.y.toFixed(2)}`, "start");
  }
  chart.series.forEach((s) => {
    const points = s.x.map((step, i) => [x(step), clamp(y(z(s.y[i])), top, bottom)]).filter((p) => Number.isFinite(p[1]));
    if (s.kind === "line") draw(svg, "path", { d: path(points), class: "curve s0" });
    if (s.kind === "points" || points.length === 1) for (const [a, b] of points) draw(svg, "circle", { cx: a, cy: b, r: s.kind === "points" ? 3.6 : 2.5, class: s.kind === "points" ? "dot" : "d2" });
    for (const step of s.bad) draw(svg, "path", { d: `M${x(step) - 4} ${top}l8 8m-8 0l8 -8`, class: "broken" });
  });
  if (wide) legend(panel.closest("figure").querySelector("h3"), chart);
  const cursor = draw(svg, "line", { y1: top, y2: bottom, class: "cursor", visibility: "hidden" });
  readout(panel, (px, py) => {
    const inside = px >= left - 8 && px <= right + 8 && py >= 0 && py <= height && first !== undefined;
    cursor.setAttribute("visibility", inside ? "visible" : "hidden");
    if (!inside) return "";
    const at = first + ((px - left) / (right - left || 1)) * (last - first), rows = [];
    let step;
    for (const s of chart.series) if (s.x.length) {
      const i = nearest(s.x, at);
      step ??= s.x[i];
      rows.push(s.kind === "points" ? `${s.name} ${number(s.y[i])} (step ${s.x[i]})` : `${chart.series.length > 1 ? s.name + " " : ""}${number(s.y[i])}`);
    }
    cursor.setAttribute("x1", x(step)); cursor.setAttribute("x2", x(step));
    return [`step ${step}`, ...rows].join("\n");
  });
}
function legend(title, chart) {
  title.querySelectorAll(".swatch").forEach((old) => old.remove());
  const marks = { line: ["\u2501", "--line"], points: ["\u25cf", "--second"] };
  for (const s of chart.series) {
    const span = document.createElement("span"), mark = document.createElement("span");
    span.className = "swatch";
    mark.textContent = marks[s.kind][0] + " ";
    mark.style.color = `var(${marks[s.kind][1]})`;
    span.append(mark, s.name + (s.bad.length ? " (\u2715 not finite)" : ""));
    title.append(span);
  }
}

// ---- maps ----------------------------------------------------------------------------------------------------------------------
function palette(scale) {
  const hex = MAPS[scale !== "signed" ? "sequential" : dark.matches ? "signedDark" : "signedLight"], stops = [];
  for (let i = 0; i < hex.length; i += 6) stops.push([0, 2, 4].map((k) => parseInt(hex.slice(i + k, i + k + 2), 16)));
  return (t) => {
    const at = clamp(t, 0, 1) * (stops.length - 1), i = Math.min(stops.length - 2, Math.floor(at)), f = at - i;
    return stops[i].map((c, k) => Math.round(c + f * (stops[i + 1][k] - c)));
  };
}
function stripes(context, ground, stripe, ratio, period, down) {
  const tile = document.createElement("canvas"), size = Math.round(period * ratio), c = tile.getContext("2d");
  tile.width = tile.height = size;
  c.fillStyle = ground; c.fillRect(0, 0, size, size);
  c.strokeStyle = stripe; c.lineWidth = Math.max(1, 1.2 * ratio);
  for (const shift of [-size, 0, size]) { c.beginPath(); if (down) { c.moveTo(shift - 1, -1); c.lineTo(shift + size + 1, size + 1); } else { c.moveTo(shift - 1, size + 1); c.lineTo(shift + size + 1, -1); } c.stroke(); }
  return context.createPattern(tile, "repeat");
}
function decode(panel) {
  if (!panel.codes) {
    const bytes = Uint8Array.from(atob(panel.cells), (c) => c.charCodeAt(0)), view = new DataView(bytes.buffer);
    panel.codes = Uint16Array.from({ length: bytes.length / 2 }, (_, i) => view.getUint16(2 * i, true));
    delete panel.cells;
  }
  return panel.codes;
}
function paint(canvas, map, panel, w, h, ratio) {
  const W = Math.max(1, Math.round(w * ratio)), H = Math.max(1, Math.round(h * ratio)), context = canvas.getContext("2d");
  canvas.width = W; canvas.height = H; canvas.style.width = `${w}px`; canvas.style.height = `${h}px`;
  const codes = decode(panel), columns = data.columns.first.length, edges = data.columns.edges, rows = panel.rows, count = rows[rows.length - 1];
  const x = line(edges[0], edges[columns], 0, W), y = line(0, count, H, 0), colour = palette(map.scale), [low, high] = map.range;
  const table = new Uint32Array(65536);  // code -> opaque little-endian RGBA; 0 stays transparent
  const put = (code, t) => { const [r, g, b] = colour(t); table[code] = (255 << 24) | (b << 16) | (g << 8) | r; };
  for (const code of new Set(codes)) if (code <= TOP) put(code, (panel.low + (code / TOP) * (panel.high - panel.low) - low) / (high - low));
  put(ZERO, 0);
  const columnOf = new Uint16Array(W), image = context.createImageData(W, H), pixels = new Uint32Array(image.data.buffer);
  for (let c = 0; c < columns; c++) columnOf.fill(c, Math.round(x(edges[c])), Math.round(x(edges[c + 1])));
  for (let r = 0; r < rows.length - 1; r++)
    for (let py = Math.round(y(rows[r + 1])); py < Math.round(y(rows[r])); py++)
      for (let px = 0; px < W; px++) pixels[py * W + px] = table[codes[r * columns + columnOf[px]]];
  context.putImageData(image, 0, 0);
  context.globalCompositeOperation = "destination-over";
  context.fillStyle = stripes(context, variable("--none"), variable("--none-stripe"), ratio, 6, true);
  context.fillRect(0, 0, W, H);
  context.globalCompositeOperation = "source-over";
  const broken = new Path2D(), least = 4 * ratio;  // a broken cell is never too small to see
  codes.forEach((code, i) => {
    if (code !== BAD) return;
    const r = Math.floor(i / columns), c = i % columns, x0 = x(edges[c]), x1 = x(edges[c + 1]), y0 = y(rows[r + 1]), y1 = y(rows[r]);
    const bw = Math.max(least, x1 - x0), bh = Math.max(least, y1 - y0);
    broken.rect(clamp((x0 + x1 - bw) / 2, 0, W - bw), clamp((y0 + y1 - bh) / 2, 0, H - bh), bw, bh);
  });
  context.fillStyle = stripes(context, variable("--bad"), variable("--bad-stripe"), ratio, 7, false);
  context.fill(broken);
}
function drawMap(panel) {
  const map = data.maps.find((m) => m.id === panel.dataset.map), part = map.panels[+panel.dataset.panel];
  const width = panel.clientWidth, log = map.scale === "log", sites = Math.max(1, map.sites.length), rows = part.rows, count = rows[rows.length - 1], depth = count / sites;
  const height = 268, top = part.title ? 22 : 10, bottom = height - 42, left = 40, side = clamp(width * 0.3, 92, 200), right = width - side - 14;
  const svg = fresh(panel, height, `${map.id} ${part.title}`), canvas = document.createElement("canvas");
  panel.prepend(canvas);
  canvas.style.left = `${left}px`; canvas.style.top = `${top}px`;
  paint(canvas, map, part, right - left, bottom - top, Math.min(3, window.devicePixelRatio || 1));
  const edges = data.columns.edges, columns = data.columns.first.length, x = line(edges[0], edges[columns], left, right), y = line(0, count, bottom, top);
  if (part.title) label(svg, left, 13, part.title, "start", { class: "title" });
  const stops = whole(ticks(edges[0], edges[columns], Math.max(2, Math.floor((right - left) / 60)))).filter(([v]) => v >= data.columns.first[0]);
  bottomAxis(svg, columns === 1 ? [[data.columns.first[0], String(data.columns.first[0])]] : stops, x, left, right, bottom, "optimizer step");
  const blocks = depth === 1 ? [[0, "0"]] : whole(ticks(0, depth - 1, 5));
  leftAxis(svg, blocks.map(([v, text]) => [(v + 0.5) * sites, text]), y, left);
  label(svg, 0, 0, "block", "middle", { transform: `translate(9 ${(top + bottom) / 2}) rotate(-90)` });
  // the curves over depth share the map's axis of depth, and the colours' range
  const p0 = right + 14, p1 = width - 4, low = Math.min(map.range[0], map.band ? map.band[0] : Infinity), high = Math.max(map.range[1], map.band ? map.band[1] : -Infinity);
  const v = line(low, high, p0, p1), marks = log ? logTicks(low, high, p1 - p0) : ticks(low, high, Math.max(3, Math.floor(side / 52)));
  if (map.band) draw(svg, "rect", { x: v(map.band[0]), width: v(map.band[1]) - v(map.band[0]), y: top, height: bottom - top, class: "band" });
  for (const [at] of marks) draw(svg, "line", { x1: v(at), x2: v(at), y1: top, y2: bottom, class: "grid" });
  if (map.scale === "signed") draw(svg, "line", { x1: v(0), x2: v(0), y1: top, y2: bottom, class: "axis" });
  bottomAxis(svg, marks, v, p0, p1, bottom, map.axis);
  const tones = { 1: [2], 2: [0, 2], 3: [0, 1, 2] }[part.profiles.length];
  part.profiles.forEach((profile, k) => {
    const points = [];
    let open = true;
    profile.forEach((z, r) => {
      if (z === null) { open = true; return; }
      points.push([v(clamp(z, low, high)), y((rows[r] + rows[r + 1]) / 2), open]);
      open = false;
    });
    draw(svg, "path", { d: path(points), class: `curve c${tones[k]}` });
    if (profile.length <= 24) for (const [a, b] of points) draw(svg, "circle", { cx: a, cy: b, r: 2, class: `d${tones[k]}` });
  });
  const across = draw(svg, "line", { x1: left, x2: p1, class: "cursor", visibility: "hidden" }), down = draw(svg, "line", { y1: top, y2: bottom, class: "cursor", visibility: "hidden" });
  readout(panel, (px, py) => {
    const on = py >= top && py < bottom && px >= left && px <= p1, overMap = on && px < right, over = on && (overMap || px >= p0);
    across.setAttribute("visibility", over ? "visible" : "hidden");
    down.setAttribute("visibility", overMap ? "visible" : "hidden");
    if (!over) return "";
    const at = ((bottom - py) / (bottom - top)) * count, r = Math.min(rows.length - 2, rows.findIndex((_, i) => i + 1 >= rows.length - 1 || rows[i + 1] > at));
    across.setAttribute("y1", y((rows[r] + rows[r + 1]) / 2)); across.setAttribute("y2", y((rows[r] + rows[r + 1]) / 2));
    const place = [part.title, span(rows[r], rows[r + 1] - 1, sites, map.sites)].filter(Boolean).join(", ");
    if (!overMap) return [place, ...part.profiles.map((p, k) => `step ${map.profileSteps[k]}: ${value(p[r], log)}`)].join("\n");
    const step = edges[0] + ((px - left) / (right - left)) * (edges[columns] - edges[0]), c = Math.max(0, edges.findIndex((e) => e > step) - 1);
    down.setAttribute("x1", x((edges[c] + edges[c + 1]) / 2)); down.setAttribute("x2", x((edges[c] + edges[c + 1]) / 2));
    const code = decode(part)[r * columns + c], { first: from, last: to } = data.columns;
    const text = code === BAD ? "not finite" : code === NONE ? "no value" : code === ZERO ? "0" : value(part.low + (code / TOP) * (part.high - part.low), log);
    return `${place}\nstep ${from[c]}${to[c] > from[c] ? `\u2013${to[c]}` : ""}: ${text}`;
  });
}
const value = (z, log) => (z === null ? "no value" : z === BELOW ? "0" : number(Number((log ? 10 ** z : z).toPrecision(4))));
function span(from, to, sites, names) {
  const a = Math.floor(from / sites), b = Math.floor(to / sites);
  if (a !== b) return `blocks ${a}\u2013${b}`;
  return `block ${a}${from === to && sites > 1 ? ", " + names[from % sites] : ""}`;
}
function drawBar(bar) {
  const map = data.maps.find((m) => m.id === bar.dataset.bar), colour = palette(map.scale), [low, high] = map.range, width = bar.clientWidth;
  bar.replaceChildren();
  const strip = document.createElement("i");
  strip.style.background = `linear-gradient(to right, ${Array.from({ length: 33 }, (_, i) => `rgb(${colour(i / 32).join(",")})`).join(",")})`;
  bar.append(strip);
  const svg = draw(bar, "svg", { width, height: 20, "aria-hidden": "true" }), x = line(low, high, 0, width);
  const marks = map.scale === "log" ? logTicks(low, high, width) : ticks(low, high, 4);
  for (const [v, text] of marks) { draw(svg, "line", { x1: x(v), x2: x(v), y1: 0, y2: 4, class: "axis" }); label(svg, x(v), 16, text); }
  if (map.band) { const [a, b] = map.band.map((v) => clamp(x(v), 0, width)); if (b > a) draw(svg, "line", { x1: a, x2: b, y1: 1.5, y2: 1.5, class: "band-line" }); }
}
function drawSteps(place) {
  const map = data.maps.find((m) => m.id === place.dataset.steps), tones = { 1: ["late"], 2: ["early", "late"], 3: ["early", "middle", "late"] }[map.profileSteps.length];
  place.replaceChildren();
  map.profileSteps.forEach((step, k) => {
    const span = document.createElement("span"), mark = document.createElement("i");
    mark.style.color = `var(--${tones[k]})`;
    span.append(mark, `step ${step}`);
    place.append(span);
  });
}

// ---- everything ----------------------------------------------------------------------------------------------------------------
function all() {
  document.querySelectorAll("[data-chart]").forEach(drawChart);
  document.querySelectorAll("[data-map]").forEach(drawMap);
  document.querySelectorAll("[data-bar]").forEach(drawBar);
  document.querySelectorAll("[data-steps]").forEach(drawSteps);
}
let width = document.body.clientWidth, waiting = 0;
all();
new ResizeObserver(() => {
  if (width === document.body.clientWidth) return;
  width = document.body.clientWidth;
  cancelAnimationFrame(waiting);
  waiting = requestAnimationFrame(all);
}).observe(document.body);
dark.addEventListener("change", all);
window.addEventListener("scroll", () => { tip.hidden = true; }, { passive: true });
})();
