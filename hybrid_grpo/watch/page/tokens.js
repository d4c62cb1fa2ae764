// The tokens of a completion as text, each colored by a number that was recorded about it.
import { el } from "./dom.js";
import { facts, hideTip, showTip } from "./tip.js";

const SURPRISING = 5;
const digits = value => (value === null || value === undefined ? "none" : String(+value.toPrecision(6)));

// Scales: `share` is from -1 to 1, 0 without a color; `ends` say what the ends of the colors are.
const signed = values => {
  const top = Math.max(...values.map(value => Math.abs(value ?? 0))) || 1;
  return { share: value => value / top, ends: [digits(-top), digits(top)] };
};
const surprise = () => ({ share: value => Math.min(1, -value / SURPRISING), ends: ["0", `−${SURPRISING} or less`] });
const doubt = () => ({ share: value => 1 - value, ends: ["1", "0"] });

const MEASURES = {
  logp: ["log-prob", surprise, "Log-probability of the token when it was sampled, in nats."],
  probability: ["probability", doubt, "Probability of the token when it was sampled."],
  advantage: ["advantage", signed, "Advantage of the token: above 0 it is made more likely."],
};
let measure = "logp";

// record: see read_tokens of tokens.py. Recorded numbers are said to 6 digits.
export function xray(record) {
  const numbers = { ...record.measures };
  if (numbers.logp) numbers.probability = numbers.logp.map(value => (value === null ? null : Math.exp(value)));
  const names = Object.keys(MEASURES).filter(name => numbers[name]);
  const spans = record.pieces.map((piece, at) =>
    el("span", { class: "token", "data-at": at }, piece.replaceAll("\n", "↵\n") || "·"),
  );
  let current = -1;

  const text = el(
    "pre",
    {
      class: "tokens",
      tabindex: 0,
      role: "group",
      "aria-label": "Tokens. The arrow keys left and right read them.",
      onpointermove: event => point(event.target.closest(".token")),
      onclick: event => point(event.target.closest(".token")),
      onpointerleave: () => mark(-1),
      onblur: () => mark(-1),
      onkeydown: event => press(event),
    },
    ...laid(),
  );
  const legend = el("span", { class: "scale" }),
    meaning = el("p", { class: "soft" });
  const select = el(
    "select",
    { onchange: event => color((measure = event.target.value)) },
    ...names.map(name => el("option", { value: name }, MEASURES[name][0])),
  );

  // The tokens with the texts that were given between them.
  function laid() {
    const parts = [];
    let at = 0;
    for (const part of [...record.given].sort((a, b) => a.before - b.before)) {
      parts.push(...spans.slice(at, part.before));
      at = Math.max(at, part.before);
      parts.push(el("span", { class: "given", title: "Given to the model, not sampled" }, part.text));
    }
    return [...parts, ...spans.slice(at)];
  }

  function color(name) {
    const [, scale, words] = MEASURES[name],
      { share, ends } = scale(numbers[name]);
    for (const [at, span] of spans.entries()) {
      const value = numbers[name][at],
        part = value === null ? 0 : share(value);
      span.style.setProperty("--share", `${Math.round(100 * Math.min(1, Math.abs(part)))}%`);
      span.classList.toggle("below", part < 0);
    }
    legend.replaceChildren(ends[0], el("i", { class: scale === signed ? "both" : "one" }), ends[1]);
    meaning.textContent = words;
  }

  function point(span) {
    if (span) mark(Number(span.dataset.at));
  }

  function mark(at) {
    spans[current]?.classList.remove("current");
    current = at;
    const span = spans[at];
    if (!span) return hideTip();
    span.classList.add("current");
    const box = span.getClientRects()[0],
      id = record.ids[at];
    showTip(
      box.right,
      box.bottom + 4,
      facts(JSON.stringify(record.pieces[at]), [
        ["token", `${at + 1} of ${spans.length}`],
        ...(id === undefined ? [] : [["id", String(id)]]),
        ...names.map(name => [MEASURES[name][0], digits(numbers[name][at])]),
      ]),
    );
  }

  function press(event) {
    const last = spans.length - 1,
      by = event.shiftKey ? 10 : 1;
    const to = {
      ArrowLeft: Math.max(0, current - by),
      ArrowRight: Math.min(last, current + by),
      Home: 0,
      End: last,
      Escape: -1,
    }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    spans[to]?.scrollIntoView({ block: "nearest" });
    mark(to);
  }

  if (!names.length) return el("div", {}, text);
  if (!names.includes(measure)) measure = names[0];
  select.value = measure;
  color(measure);
  return el(
    "div",
    { class: "xray" },
    el("div", { class: "tools" }, el("label", {}, "Color by ", select), legend),
    meaning,
    text,
  );
}
