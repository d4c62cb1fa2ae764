// The runs of a group as one curve: at each place the mean of their values, the highest and the lowest.

// The value of a curve at x, between the two points next to it.
function valueAt([xs, values], x) {
  const next = xs.findIndex(other => other >= x);
  if (next <= 0) return values[Math.max(0, next)];
  const share = (x - xs[next - 1]) / (xs[next] - xs[next - 1]);
  return values[next - 1] + share * (values[next] - values[next - 1]);
}

// lines: see Plot. Returns one line, with its `spread` as an upper and a lower edge; where runs have no places in
// common, the lines themselves.
export function together(team, lines) {
  if (lines.length < 2) return lines;
  const tables = lines.map(line => line.smooth ?? line.raw),
    low = Math.max(...tables.map(([xs]) => xs[0])),
    high = Math.min(...tables.map(([xs]) => xs.at(-1)));
  const xs = tables
    .map(([places]) => places.filter(x => x >= low && x <= high))
    .reduce((one, other) => (other.length > one.length ? other : one));
  if (!xs.length) return lines;
  const values = xs.map(x => tables.map(table => valueAt(table, x)));
  const edge = pick => [xs, values.map(each => pick(...each))];
  const mean = values.map(each => each.reduce((sum, value) => sum + value, 0) / each.length);
  return [{ ...lines[0], run: team, raw: [xs, mean], smooth: undefined, spread: [edge(Math.max), edge(Math.min)] }];
}
