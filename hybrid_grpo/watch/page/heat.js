// A map of cells: a number as a colour, from dark (low) to light (high).
import { el, number } from "./dom.js";
import { Frame } from "./frame.js";

const COLORS = ["#472d7b", "#3b528b", "#2c728e", "#21918c", "#28ae80", "#5ec962", "#addc30", "#fde725"].map(color =>
  [1, 3, 5].map(at => parseInt(color.slice(at, at + 2), 16)),
);

function color(share) {
  const at = Math.max(0, Math.min(1, share)) * (COLORS.length - 1),
    low = Math.min(COLORS.length - 2, Math.floor(at));
  return COLORS[low].map((part, channel) => part + (at - low) * (COLORS[low + 1][channel] - part));
}

export class Heat {
  constructor(options) {
    this.frame = new Frame(options);
    this.card = this.frame.card;
    this.canvas = el("canvas", { class: "cells" });
    this.frame.area.classList.add("heat");
  }

  // values: [rows][columns], null for none, the first row at the top; x, y: labels along the sides; words: see Frame;
  // say(row, column), pick(row, column); ends: the numbers of the darkest and the lightest colour.
  show({ values, x, y, words, say, pick = () => {}, ends = null }) {
    const rows = values.length,
      columns = values[0]?.length ?? 0,
      known = values.flat().filter(value => value !== null);
    const [low, high] =
      ends ?? known.reduce(([a, b], value) => [Math.min(a, value), Math.max(b, value)], [Infinity, -Infinity]);
    Object.assign(this.canvas, { width: Math.max(1, columns), height: Math.max(1, rows) });
    const context = this.canvas.getContext("2d"),
      image = context.createImageData(this.canvas.width, this.canvas.height);
    for (const [row, line] of values.entries())
      for (const [column, value] of line.entries())
        if (value !== null)
          image.data.set([...color((value - low) / (high - low || 1)), 255], 4 * (row * columns + column));
    context.putImageData(image, 0, 0);
    this.frame.labels(x, y);
    this.frame.show({
      words,
      picture: this.canvas,
      count: rows * columns,
      columns,
      box: at => [(at % columns) / columns, Math.floor(at / columns) / rows, 1 / columns, 1 / rows],
      under: (left, top) =>
        left < 0 || left >= 1 || top < 0 || top >= 1
          ? -1
          : Math.floor(top * rows) * columns + Math.floor(left * columns),
      say: at => say(Math.floor(at / columns), at % columns),
      pick: at => pick(Math.floor(at / columns), at % columns),
    });
    this.frame.legend.replaceChildren(
      el(
        "span",
        { class: "scale" },
        known.length ? number(low) : "",
        el("i", { class: "viridis" }),
        known.length ? number(high) : "",
      ),
    );
  }
}
