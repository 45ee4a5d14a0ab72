// Draws the maps of a run's report, as canvas with SVG axes, beside what page.js draws.
const TOP = 65000, ZERO = 65533, BAD = 65534, NONE = 65535, BELOW = -99;
const MAPS = {
  sequential: "440154471063481f70472d7b4439834046883b528b365d8d31688e2c728e287c8e24868e21918c1f9a8a20a48628ae8035b77948c16e5ec96275d05490d743addc30c8e020e5e419fde725",
  signedLight: "0530611249842065ab327cb74393c36bacd190c4ddb1d5e7d1e5f0e4eef4f7f6f6fae9dffddbc7f8bfa4f3a481e48066d6604dc43b3cb1182b8a0b2567001f",
  signedDark: "9eb0ff82adf262a6e04497c63280a628688620526a173c4d11273211161b190c09260d013710004a150261200b7d341e964a36b06253ca7b71e59590ffadad",
};

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

drawers.push(["[data-map]", drawMap], ["[data-bar]", drawBar], ["[data-steps]", drawSteps]);
