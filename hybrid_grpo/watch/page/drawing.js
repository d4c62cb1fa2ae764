// Shapes in shares of a picture: 0, 0 is the upper left corner and 1, 1 the lower right one.
const SVG = "http://www.w3.org/2000/svg",
  SIZE = 1000;

function node(tag, attributes, ...children) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) {
    // Colors are variables of the page, which only a style may name.
    if (name === "fill") element.style.fill = value;
    else element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

export const drawing = (...shapes) =>
  node("svg", { viewBox: `0 0 ${SIZE} ${SIZE}`, preserveAspectRatio: "none", "aria-hidden": "true" }, ...shapes);

// The area between a line through the points and a floor.
export function outline(xs, ys, floor, style) {
  const points = xs.map((x, at) => `${(SIZE * x).toFixed(1)} ${(SIZE * ys[at]).toFixed(1)}`);
  const ends = [`${SIZE * xs.at(-1)} ${SIZE * floor}`, `${SIZE * xs[0]} ${SIZE * floor}`];
  return node("path", { d: `M${[...points, ...ends].join("L")}Z`, ...style });
}
