// Draws line charts as SVG, with a read-out at the pointer. No library. Stands in one function with what a page adds (report.js, ...).
const data = JSON.parse(document.getElementById("data").textContent);
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
  const enough = (pairs) => pairs.length > 2;
  for (const pairs of [[1, 2, 5], [1, 3]].map(within)) if (enough(pairs) && fits(pairs)) return pairs;
  for (let every = 1; every <= high - low; every++) {
    const found = [];
    for (let e = Math.ceil(low - 1e-9); inside(e); e++) if (e % every === 0) found.push([e, power(e)]);
    if (fits(found)) return found;
  }
  const few = [[1, 2, 3, 5, 7], [2, 5], [1, 5]].map(within).filter(fits);
  if (few.some(enough)) return few.find(enough);
  let even = ticks(10 ** low, 10 ** high, Math.max(1, Math.floor(length / 60))).map(([v, text]) => [Math.log10(v), text]);
  while (enough(even) && !fits(even)) even = even.filter((_, i) => i % 2 === 0);
  return enough(even) || !few.length ? even : few[0];
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
// A series of a run that stands beside others (a page of several) has its number, `run`: one of eight colours, one of four dashes.
const HUES = 8, DASHES = 4;
const look = (s) => (s.run === undefined ? "s0" : `run h${s.run % HUES} dash${Math.floor(s.run / HUES) % DASHES}${s.faint ? " faint" : ""}`);
function levels(chart) {  // bounds in the coordinate that is drawn (log10 on a log scale)
  const log = chart.scale === "log", height = (v) => (log ? Math.log10(v) : v);
  const values = chart.series.flatMap((s) => s.y).filter((v) => !log || v > 0).map(height).sort((a, b) => a - b);
  if (!values.length) return { low: 0, high: 1, height };
  let low = values[0], high = values[values.length - 1];
  if (chart.lines.length || (chart.wide && data.runs)) {  // a loss: what is far above the usual start and the uniform baseline leaves the frame
    const lines = chart.lines.map((l) => l.y), begun = new Map();
    for (const s of chart.series) if (s.y.length && !begun.has(s.run)) begun.set(s.run, s.y[0]);  // of a run the first series: as logged
    const starts = [...begun.values()].sort((a, b) => a - b);
    high = Math.min(high, 1.15 * Math.max(starts[starts.length >> 1], ...lines));
    low = Math.min(low, ...lines);
    high = Math.max(high, ...lines);
  } else if (chart.scale === "linear" && !chart.wide) low = Math.min(low, 0);
  const pad = (high - low) * 0.05 || Math.abs(high) * 0.1 || 1;
  return { low: chart.scale === "linear" && low === 0 ? 0 : low - pad, high: high + pad, height };
}
function drawChart(panel) {
  const chart = data.charts.find((c) => c.id === panel.dataset.chart), { wide, height } = chart, [axis, at] = chart.axis;
  const width = panel.clientWidth, left = 48, right = width - (chart.lines.length ? 84 : 10), top = 10, bottom = height - 40;
  const svg = fresh(panel, height, chart.title), { low, high, height: z } = levels(chart);
  const places = chart.span ?? chart.series.flatMap((s) => [...s.x, ...s.bad]), first = Math.min(...places), last = Math.max(...places);
  const x = first === last ? () => (left + right) / 2 : line(first, last, left, right), y = line(low, high, bottom, top);
  const marks = chart.scale === "log" ? logTicks(low, high, bottom - top, upward) : ticks(low, high, Math.round(height / 47));
  leftAxis(svg, marks, y, left, right);
  const few = ticks(first, last === first ? first + 1 : last, Math.max(2, Math.floor((right - left) / 90)));
  bottomAxis(svg, first === last ? [[first, String(first)]] : chart.whole ? whole(few) : few, x, left, right, bottom, axis, 12);
  const names = chart.lines.map((l) => ({ ...l, at: y(z(l.y)) })).sort((a, b) => a.at - b.at);
  let above = -Infinity;
  for (const l of names) {
    draw(svg, "line", { x1: left, x2: right, y1: l.at, y2: l.at, class: "level" });
    above = Math.max(l.at + 4, above + 14);
    label(svg, right + 6, above, `${l.name} ${l.y.toFixed(2)}`, "start");
  }
  chart.series.forEach((s) => {
    const points = s.x.map((v, i) => [x(v), clamp(y(z(s.y[i])), top, bottom)]).filter((p) => Number.isFinite(p[1]));
    const several = s.run !== undefined, group = draw(svg, "g", several ? { "data-of": s.run } : {});
    if (s.kind === "line") draw(group, "path", { d: path(points), class: `curve ${look(s)}` });
    if (several && !s.faint && points.length <= 24) for (const [a, b] of points) draw(group, "circle", { cx: a, cy: b, r: 2.4, class: `spot ${look(s)}` });
    else if (s.kind === "points" || points.length === 1) for (const [a, b] of points) draw(group, "circle", { cx: a, cy: b, r: s.kind === "points" ? 3.6 : 2.5, class: s.kind === "points" ? "dot" : "d2" });
    for (const v of s.bad) draw(group, "path", { d: `M${x(v) - 4} ${top}l8 8m-8 0l8 -8`, class: `broken ${several ? look(s) : ""}` });
  });
  if (wide && !data.runs) legend(panel.closest("figure").querySelector("h3"), chart);
  const cursor = draw(svg, "line", { y1: top, y2: bottom, class: "cursor", visibility: "hidden" });
  readout(panel, (px, py) => {
    const inside = px >= left - 8 && px <= right + 8 && py >= 0 && py <= height && Number.isFinite(first);
    cursor.setAttribute("visibility", inside ? "visible" : "hidden");
    if (!inside) return "";
    const where = first + ((px - left) / (right - left || 1)) * (last - first), slack = (last - first) / 50, rows = [];
    let found;
    for (const s of chart.series) if (s.x.length && !s.faint) {
      if (s.run !== undefined && (where < s.x[0] - slack || where > s.x[s.x.length - 1] + slack)) continue;  // it has nothing here
      const i = nearest(s.x, where);
      found ??= s.x[i];
      rows.push(s.kind === "points" ? `${s.name} ${number(s.y[i])} (step ${s.x[i]})` : `${chart.series.length > 1 ? s.name + " " : ""}${number(s.y[i])}`);
    }
    cursor.setAttribute("x1", x(found ?? where)); cursor.setAttribute("x2", x(found ?? where));
    return rows.length ? [`${at} ${placed(chart, found)}`, ...rows].join("\n") : "";
  });
}
function placed(chart, v) {  // a place on the bottom axis; on one of blocks, also which of its sites
  const names = chart.sites ?? [];
  return names.length ? `${Math.floor(v + 1e-6)}, ${names[Math.round((v - Math.floor(v + 1e-6)) * names.length)]}` : Number(v.toFixed(3));
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

// ---- everything ----------------------------------------------------------------------------------------------------------------
const drawers = [["[data-chart]", drawChart]];  // what is drawn where; a page's own script adds its own
function start() {
  const all = () => { for (const [place, drawer] of drawers) document.querySelectorAll(place).forEach(drawer); };
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
}
