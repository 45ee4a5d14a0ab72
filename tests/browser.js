// What is wrong with the words of this page? Written into it as JSON, for browser.py to read.
(() => {
  const found = [];
  const short = (text) => JSON.stringify(text.trim().replace(/\s+/g, " ").slice(0, 60));

  // ---- where words stand
  const words = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    const parent = node.parentElement;
    if (!node.data.trim() || parent.closest("script, style, title, desc, metadata") || getComputedStyle(parent).visibility === "hidden") continue;
    const range = document.createRange();
    range.selectNodeContents(node);
    const inSvg = parent.closest("svg");
    const boxes = inSvg ? [parent.getBoundingClientRect()] : [...range.getClientRects()];
    for (const box of boxes) {
      if (box.width < 0.5 || box.height < 0.5) continue;
      // the box of a line is higher than its letters
      const spare = (inSvg ? 0.12 : 0.2) * Math.min(box.width, box.height);
      words.push({ text: node.data, parent, inSvg, box, left: box.left, right: box.right, top: box.top + spare, bottom: box.bottom - spare });
    }
  }

  // ---- one upon another
  words.sort((a, b) => a.top - b.top);
  words.forEach((a, i) => {
    for (let j = i + 1; j < words.length && words[j].top < a.bottom - 1; j++) {
      const b = words[j];
      if (a.parent === b.parent && !a.inSvg) continue;
      if (Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1) found.push(`${short(a.text)} and ${short(b.text)} overlap`);
    }
  });

  // ---- cut off
  const scrolls = (node) => { for (; node; node = node.parentElement) if (/auto|scroll/.test(getComputedStyle(node).overflowX) && node !== document.body) return true; return false; };
  for (const { text, parent, inSvg, box } of words) {
    if ((box.right > window.innerWidth + 1 || box.left < -1) && !scrolls(parent)) found.push(`${short(text)} leaves the window`);
    for (let node = inSvg ?? parent; node && node !== document.documentElement; node = node.parentElement) {
      if (!/hidden|clip/.test(getComputedStyle(node).overflow)) continue;
      const frame = node.getBoundingClientRect();
      if (box.left < frame.left - 1 || box.right > frame.right + 1 || box.top < frame.top - 2 || box.bottom > frame.bottom + 2) found.push(`${short(text)} is cut off`);
    }
  }

  // ---- hardly to be seen
  const parts = (colour) => { const v = colour.match(/[\d.]+/g).map(Number); return v.length < 4 ? [...v, 1] : v; };
  const over = (top, below) => [0, 1, 2].map((k) => top[k] * top[3] + below[k] * (1 - top[3]));
  const light = (c) => { const [r, g, b] = c.map((v) => v / 255).map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)); return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  const turned = (c) => {  // hue-rotate(180deg), as the specification has it
    const m = [[-0.574, 1.43, 0.144], [0.426, 0.43, 0.144], [0.426, 1.43, -0.856]];
    return m.map((row) => Math.min(255, Math.max(0, row[0] * c[0] + row[1] * c[1] + row[2] * c[2])));
  };
  const filtered = (c, filter) => {
    const inverted = filter.match(/invert\(([\d.]+)\)/);
    if (inverted) c = c.map((v) => 255 * inverted[1] + v * (1 - 2 * inverted[1]));
    return filter.includes("hue-rotate(180deg)") ? turned(c) : c;
  };
  // fills of the shapes of a drawing that were drawn before a word, and that its middle lies in
  const under = (box, parent) => {
    const x = (box.left + box.right) / 2, y = (box.top + box.bottom) / 2;
    return [...parent.closest("svg").querySelectorAll("path, rect")].filter((shape) => {
      const there = shape.getBoundingClientRect();
      return shape.compareDocumentPosition(parent) & Node.DOCUMENT_POSITION_FOLLOWING && !shape.closest("defs")
        && there.left <= x && x <= there.right && there.top <= y && y <= there.bottom && getComputedStyle(shape).fill !== "none";
    }).map((shape) => {
      const style = getComputedStyle(shape), [r, g, b, a] = parts(style.fill);
      return [r, g, b, a * style.fillOpacity * style.opacity];
    });
  };
  const known = new Map();
  for (const { text, parent, inSvg, box } of words) {
    if (known.has(parent)) continue;
    known.set(parent, true);
    const style = getComputedStyle(parent), chain = [];
    let opacity = 1;
    for (let node = parent; node; node = node.parentElement) { chain.push(getComputedStyle(node)); opacity *= +getComputedStyle(node).opacity; }
    let paper = [255, 255, 255], filters = [];
    for (const one of chain.reverse()) {
      paper = over(parts(one.backgroundColor), paper);
      if (one.filter !== "none") filters.push(one.filter);
    }
    if (inSvg) for (const shape of under(box, parent)) paper = over(shape, paper);
    const fill = parts(inSvg && style.fill !== "none" ? style.fill : style.color);
    let ink = over([fill[0], fill[1], fill[2], fill[3] * opacity], paper);
    for (const filter of filters) { ink = filtered(ink, filter); paper = filtered(paper, filter); }
    const [a, b] = [light(ink), light(paper)].sort((x, y) => y - x), ratio = (a + 0.05) / (b + 0.05);
    if (ratio < CONTRAST) found.push(`${short(text)} has a contrast of ${ratio.toFixed(2)} (${parent.closest("[class]")?.getAttribute("class") ?? parent.tagName})`);
  }

  const said = document.createElement("script");
  said.type = "application/json";
  said.id = "seen";
  said.textContent = JSON.stringify({ words: words.length, faults: [...new Set(found)] }).replace(/</g, "\\u003c");
  document.body.append(said);
})();
