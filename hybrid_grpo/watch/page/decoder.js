// What one rank's decoder did during a rollout: slots that decode, slots that wait, and completions in the queue.
import { el, number, seconds } from "./dom.js";
import { Frame } from "./frame.js";
import { drawing, outline } from "./drawing.js";
import { facts } from "./tip.js";

const KINDS = [
  ["decoding", "--c0"],
  ["waiting", "--c1"],
  ["queued", "--c5"],
];
// Share of the picture that the slots have, where there is a queue below them. style.css has it too.
const UPPER = 0.72;
const at = (series, place) => series?.[place] ?? 0;

export class Decoder {
  constructor() {
    this.frame = new Frame({ title: "Decoder", tall: 170, hint: "The arrow keys read times." });
    this.card = this.frame.card;
    this.ranks = el("select", { "aria-label": "Rank of the decoder", onchange: () => this.choose() });
    this.picked = false;
    this.card.classList.add("wide");
    this.frame.tools.append(this.ranks);
    this.all = [];
  }

  // decoders: of each rank (null where it decoded nothing) the times `t` in seconds, and at each the numbers of completions by KINDS; `slots`.
  show(decoders) {
    this.all = decoders;
    const ends = decoders.map(one => one?.t?.at(-1) ?? 0);
    if (this.ranks.options.length !== decoders.length) {
      this.ranks.replaceChildren(...decoders.map((_, rank) => el("option", { value: rank }, `rank ${rank}`)));
      this.picked = false;
    }
    // Unless the reader has chosen one: the rank that the others wait for.
    if (!this.picked) this.ranks.value = ends.indexOf(Math.max(...ends));
    this.ranks.hidden = decoders.length < 2;
    this.draw();
  }

  choose() {
    this.picked = true;
    this.draw();
  }

  draw() {
    const one = this.all[Number(this.ranks.value)],
      times = one?.t ?? [];
    this.frame.area.hidden = this.frame.above.hidden = this.frame.below.hidden = !times.length;
    this.frame.legend.textContent = times.length ? "" : "This rank decoded nothing.";
    if (!times.length) return this.frame.clear();
    const start = times[0],
      end = times.at(-1),
      slots = one.slots ?? Math.max(1, ...times.map((_, place) => at(one.decoding, place) + at(one.waiting, place))),
      queue = Math.max(0, ...(one.queued ?? [])),
      upper = queue ? UPPER : 1;
    // Above: slots by what they do. Below, from its own 0: the queue.
    const busy = times.map((_, place) => at(one.decoding, place)),
      used = times.map((_, place) => busy[place] + at(one.waiting, place));
    const x = times.map(time => (time - start) / (end - start || 1)),
      slotHeight = value => upper * (1 - value / slots),
      queueHeight = value => 1 - (0.94 - upper) * (value / (queue || 1));
    const area = (values, height, floor, color) =>
      outline(x, values.map(height), floor, { fill: `var(${color})`, opacity: 0.85 });
    const spent = times.map((time, place) => time - (times[place - 1] ?? time)),
      total = spent.reduce((sum, part) => sum + part, 0) || 1,
      share = spent.reduce((sum, part, place) => sum + (part * Math.min(1, busy[place] / slots)) / total, 0),
      tail = spent.reduce(
        (sum, part, place) => sum + (2 * busy[place] < slots && !at(one.queued, place) ? part : 0),
        0,
      );
    const words = `${slots} slots, ${Math.round(100 * share)} % of them decoding; for the last ${seconds(tail)} fewer than half.`;
    this.frame.labels([start, (start + end) / 2, end].map(seconds), [
      `${slots} slots`,
      "0",
      ...(queue ? [`${number(queue)} queued`] : []),
    ]);
    this.frame.above.classList.toggle("decoder-y", queue > 0);
    this.frame.show({
      words,
      picture: drawing(
        area(used, slotHeight, upper, KINDS[1][1]),
        area(busy, slotHeight, upper, KINDS[0][1]),
        area(
          times.map((_, place) => at(one.queued, place)),
          queueHeight,
          1,
          KINDS[2][1],
        ),
      ),
      count: times.length,
      box: place => [Math.max(0, x[place] - 0.002), 0, 0.004, 1],
      under: left =>
        x.reduce((best, value, place) => (Math.abs(value - left) < Math.abs(x[best] - left) ? place : best), 0),
      say: place =>
        facts(seconds(times[place]), [
          ...KINDS.map(([kind]) => [kind, String(at(one[kind], place))]),
          ["slots", String(slots)],
        ]),
    });
    const pages = one.pages_used_max;
    this.frame.legend.replaceChildren(
      ...KINDS.map(([kind, color]) =>
        el("span", {}, el("i", { class: "key", style: { background: `var(${color})` } }), kind),
      ),
      el("span", {}, words, pages === undefined ? "" : ` At most ${Math.round(100 * pages)} % of the cache in use.`),
    );
  }
}
