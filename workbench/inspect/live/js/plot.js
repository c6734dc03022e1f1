// plot.js: a small chart frame in SVG. In: a title, two ranges. Out: the node and the two scales.

/** So many things to count have a tick each. */
const FEW = 12;

export function shape(tag, attributes, text) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (text !== undefined) node.textContent = text;
  return node;
}

/** `ticksY`: [value, label]; without it the two ends of the range. `whole`: x counts things, so its ticks are whole numbers. */
export function plot(title, [left, right], [bottom, top], { width = 460, height = 200, ticksY = null, whole = false } = {}) {
  const node = shape("svg", { class: "wb-plot", viewBox: `0 0 ${width} ${height}`, role: "img" });
  const x = (value) => 42 + ((value - left) / (right - left || 1)) * (width - 50);
  const y = (value) => height - 34 - ((value - bottom) / (top - bottom || 1)) * (height - 50);
  const short = (value) => (Math.abs(value) >= 100 ? Math.round(value).toLocaleString("en-US") : Number(value.toPrecision(3)).toString());
  node.append(shape("title", {}, title), shape("path", { d: `M42 ${height - 34}H${width - 8}`, stroke: "var(--wb-line)" }));
  for (const [value, label] of ticksY ?? [[top, short(top)], [bottom, short(bottom)]]) {
    node.append(shape("text", { x: 38, y: y(value) + 4, "text-anchor": "end" }, label));
  }
  let ticks = [left, (left + right) / 2, right].map((value) => (whole ? Math.floor(value) : value));
  if (whole && right - left <= FEW) ticks = Array.from({ length: Math.floor(right - left) + 1 }, (_, k) => left + k);
  for (const [k, value] of [...new Set(ticks)].entries()) {
    node.append(shape("text", { x: x(value), y: height - 20, "text-anchor": k === 0 ? "start" : value === right ? "end" : "middle" }, short(value)));
  }
  node.append(shape("text", { x: 42 + (width - 50) / 2, y: height - 4, "text-anchor": "middle" }, title));
  return { node, x, y };
}
