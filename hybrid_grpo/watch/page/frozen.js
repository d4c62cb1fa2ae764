// The answers of a page that was frozen: what the server would say, from what the file has inside.
const inside = document.getElementById("frozen");
export const frozen = inside && JSON.parse(inside.textContent);

// Where a step is on an axis; between two steps whose places are known, in proportion.
function onAxis(step, axis) {
  const { step: steps, [axis]: places } = frozen.curves.axes,
    next = Math.max(
      1,
      steps.findIndex(other => other >= step),
    );
  if (steps.length < 2) return places[0];
  const share = (step - steps[next - 1]) / (steps[next] - steps[next - 1]);
  return places[next - 1] + share * (places[next] - places[next - 1]);
}

function curves({ run, name, axis, window }) {
  const { curves: all, places, axes } = frozen.curves,
    known = place => (axis === "step" ? places[place] : places[place].map(step => onAxis(step, axis)));
  const parts = curve => Object.entries(curve).filter(([part]) => part === "raw" || window !== "1");
  const found = name.map(one => [
    one,
    Object.fromEntries(parts(all[one] ?? {}).map(([part, [place, values]]) => [part, [known(place), values]])),
  ]);
  return { [run]: { curves: Object.fromEntries(found), from: axes[axis][0], to: axes[axis].at(-1) } };
}

const parts = content => (Array.isArray(content) ? content.map(part => part.text ?? "").join(" ") : content);
const said = text =>
  Array.isArray(text) ? text.map(message => parts(message.content)).join("\n\n") : String(text ?? "");
const within = (value, low, high) =>
  (low === "" || (value !== null && value >= Number(low))) &&
  (high === "" || (value !== null && value <= Number(high)));

function samples({ text, finish, first, last, prompt, least, most }) {
  const { rows, steps, kept } = frozen.samples,
    wanted = text.toLowerCase();
  const looked = rows.filter(({ row }) => within(row.step, first, last));
  const found = looked.filter(
    ({ all }) =>
      (!finish || all.finish === finish) &&
      within(all.reward, least, most) &&
      (prompt === "" || all.prompt_id === Number(prompt)) &&
      [all.prompt, all.completion, all.messages].some(one => said(one).toLowerCase().includes(wanted)),
  );
  const shown = found.map(({ row }, rank) => ({ ...row, rank }));
  return { rows: shown, read: looked.length, next: null, steps, kept, count: frozen.samples.count };
}

const sample = ({ step, offset }) =>
  frozen.samples.rows.find(({ row }) => row.step === Number(step) && row.offset === Number(offset));

function rival(place) {
  const [kind, offset] = sample(place).rival ?? [],
    found = kind && sample({ ...place, offset });
  return found ? { kind, row: found.all } : null;
}

const group = place =>
  frozen.samples.rows
    .filter(({ all }) => all.step === sample(place).all.step && all.group === sample(place).all.group)
    .map(({ row, all }) => ({ ...all, offset: row.offset }));

// The step that was kept nearest to the one that is asked for.
function step({ step: wanted }) {
  const { kept, steps } = frozen.step,
    away = one => Math.abs(one.details.step - wanted);
  const found =
    wanted === null ? kept.at(-1) : kept.reduce((best, one) => (away(one) < away(best) ? one : best), kept[0]);
  return { details: null, ...found, steps, kept: kept.map(one => one.details.step) };
}

const answers = {
  curves,
  samples,
  rival,
  group,
  step,
  sample: place => sample(place).all,
  tokens: place => sample(place).tokens,
};

export const answer = (question, parameters) =>
  question in answers ? answers[question](parameters) : frozen[question];
