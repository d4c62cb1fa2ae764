// The time of the parts of the steps, one on top of the other, from the first step to the last.
import { duration, el, number, seconds, whole } from "./dom.js";
import { drawing, outline } from "./drawing.js";
import { Frame } from "./frame.js";
import { facts } from "./tip.js";

const label = part => part.replaceAll("_", " ");

export class Layers {
  // open(first, last) shows steps; color(name): the color of a part.
  constructor({ title, unit, color }, open) {
    Object.assign(this, { open, color });
    this.frame = new Frame({ title, unit, tall: 170, hint: "The arrow keys read steps, enter opens them." });
    this.card = this.frame.card;
    this.card.classList.add("wide");
  }

  // steps: first and last step of each column; layers: of each part its mean seconds by column, and those in all.
  show({ steps, layers }) {
    const count = steps.length,
      total = layers.reduce((sum, layer) => sum + layer.total, 0),
      heights = steps.map((_, at) => layers.reduce((sum, layer) => sum + layer.values[at], 0)),
      top = Math.max(...heights),
      color = at => this.color(layers[at].name);
    // Each column is as wide as the others, and as high all over.
    const x = steps.flatMap((_, at) => [at / count, (at + 1) / count]);
    const floor = steps.map(() => 0),
      areas = layers.map((layer, place) => {
        for (const at of steps.keys()) floor[at] += layer.values[at];
        const y = floor.flatMap(height => [1 - height / top, 1 - height / top]);
        return outline(x, y, 1, { fill: color(place), opacity: 0.85 });
      });
    const span = at => {
      const [first, last] = steps[at];
      return first === last ? `step ${whole(first)}` : `steps ${whole(first)} to ${whole(last)}`;
    };
    const share = layer => `${number((100 * layer.total) / total)} %`;
    this.frame.labels(
      [steps[0][0], steps[Math.floor(count / 2)][0], steps[count - 1][1]].map(step => `step ${whole(step)}`),
      [seconds(top), "0"],
    );
    this.frame.show({
      words: layers.map(layer => `${label(layer.name)} ${share(layer)}`).join(", ") + ".",
      // The last layer reaches highest: it lies below the others.
      picture: drawing(...areas.reverse()),
      count,
      box: at => [at / count, 0, 1 / count, 1],
      under: left => Math.min(count - 1, Math.max(0, Math.floor(left * count))),
      say: at =>
        facts(span(at), [
          ...layers.map(layer => [label(layer.name), seconds(layer.values[at])]),
          ["together", seconds(heights[at])],
        ]),
      pick: at => this.open(...steps[at]),
    });
    this.frame.legend.replaceChildren(
      ...layers.map((layer, at) =>
        el(
          "span",
          { title: layer.meaning },
          el("i", { class: "key", style: { background: color(at) } }),
          `${label(layer.name)} `,
          el("b", {}, share(layer)),
          ` ${duration(layer.total)}`,
        ),
      ),
    );
  }
}
