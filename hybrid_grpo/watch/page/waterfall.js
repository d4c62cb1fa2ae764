// The stages of a step by rank, from its start: who waited for whom.
import { el, seconds } from "./dom.js";
import { Frame } from "./frame.js";
import { partColor } from "./state.js";
import { facts } from "./tip.js";

const LANE = 26,
  MANY_LANES = 14;
const label = stage => stage.replaceAll("_", " ");

export class Waterfall {
  constructor() {
    this.frame = new Frame({ title: "Where the time went, by rank", hint: "The arrow keys read stages." });
    this.card = this.frame.card;
    this.card.classList.add("wide", "waterfall");
  }

  // stages: of each rank [name, start, end] in seconds since the step began.
  show(stages) {
    const names = [...new Set(stages.flat().map(([name]) => name))],
      end = Math.max(...stages.flat().map(([, , to]) => to), 1e-9),
      marks = stages.flatMap((lane, rank) => lane.map(stage => [rank, ...stage]));
    const total = (lane, stage) => lane.reduce((sum, [name, from, to]) => sum + (name === stage ? to - from : 0), 0);
    const slowest = straggler(stages, names, total, end);
    const share = 1 / stages.length,
      lane = stages.length > 16 ? MANY_LANES : LANE;
    this.frame.area.style.height = `${lane * stages.length}px`;
    const bars = marks.map(([rank, name, from, to]) =>
      el("i", {
        class: "stage",
        style: {
          left: `${(100 * from) / end}%`,
          width: `${(100 * (to - from)) / end}%`,
          top: `${100 * rank * share}%`,
          height: `${100 * share}%`,
          "--stage": partColor(name),
        },
      }),
    );
    this.frame.labels(
      [0, end / 2, end].map(seconds),
      stages.length > 16 ? ["rank 0", `rank ${stages.length - 1}`] : stages.map((_, rank) => `rank ${rank}`),
    );
    this.frame.above.classList.toggle("lanes", stages.length <= 16);
    this.frame.show({
      words: `${stages.length} ranks, ${seconds(end)}. ${slowest ?? ""}`,
      picture: el("div", { class: "stages" }, ...bars),
      count: marks.length,
      box: at => {
        const [rank, , from, to] = marks[at];
        return [from / end, rank * share, (to - from) / end, share];
      },
      under: (left, top) =>
        marks.findIndex(
          ([rank, , from, to]) => rank === Math.floor(top * stages.length) && left * end >= from && left * end < to,
        ),
      say: at => {
        const [rank, name, from, to] = marks[at],
          all = stages.map(other => total(other, name)).sort((a, b) => a - b);
        return facts(`${label(name)}, rank ${rank}`, [
          ["took", seconds(to - from)],
          ["from", seconds(from)],
          ["to", seconds(to)],
          ...(stages.length > 1 ? [["median of the ranks", seconds(all[Math.floor(all.length / 2)])]] : []),
        ]);
      },
    });
    this.frame.legend.replaceChildren(
      ...names.map(name =>
        el("span", {}, el("i", { class: "key", style: { background: partColor(name) } }), label(name)),
      ),
      slowest ? el("span", { class: "bad" }, slowest) : "",
    );
  }
}

// The rank that others wait for most, in words; null where that is less than a 20th of the step.
function straggler(stages, names, total, end) {
  let worst = null;
  // Who waits is not slow: the others are.
  for (const name of names.filter(other => other !== "wait")) {
    const all = stages.map(lane => total(lane, name)),
      middle = [...all].sort((a, b) => a - b)[Math.floor((all.length - 1) / 2)],
      most = Math.max(...all);
    if (most > 1.2 * middle && most - middle > (worst?.lost ?? end / 20))
      worst = { lost: most - middle, rank: all.indexOf(most), name };
  }
  if (!worst || stages.length < 2) return null;
  return `Rank ${worst.rank} is ${seconds(worst.lost)} slower than the median in ${label(worst.name)}.`;
}
