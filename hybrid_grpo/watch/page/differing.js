// Two texts in pieces, each with whether it differs from the other text; by words, short texts by characters.
const LONGEST = 4000,
  SHORT = 40,
  ALIKE = 0.5;

// The pieces of both texts; texts with little in common are left whole.
export function differing(left, right) {
  const texts = [left.slice(0, LONGEST), right.slice(0, LONGEST)];
  const pattern = Math.max(left.length, right.length) <= SHORT ? /./gsu : /\s+|[\p{L}\p{N}_]+|[^\s\p{L}\p{N}_]/gu;
  const [a, b] = texts.map(text => text.match(pattern) ?? []);
  const common = shared(a, b);
  const isAlike = 2 * common.length >= ALIKE * (a.length + b.length);
  return [a, b].map((words, side) => {
    if (!isAlike) return [[texts[side], false]];
    const kept = new Set(common.map(pair => pair[side])),
      pieces = [];
    for (const [at, word] of words.entries()) {
      const differs = !kept.has(at);
      if (pieces.at(-1)?.[1] === differs) pieces.at(-1)[0] += word;
      else pieces.push([word, differs]);
    }
    return pieces;
  });
}

// A longest common subsequence, as pairs of places.
function shared(a, b) {
  const width = b.length + 1,
    lengths = new Uint16Array((a.length + 1) * width);
  for (let i = a.length - 1; i >= 0; i--)
    for (let j = b.length - 1; j >= 0; j--)
      lengths[i * width + j] =
        a[i] === b[j]
          ? lengths[(i + 1) * width + j + 1] + 1
          : Math.max(lengths[(i + 1) * width + j], lengths[i * width + j + 1]);
  const pairs = [];
  let i = 0,
    j = 0;
  while (i < a.length && j < b.length) {
    if (a[i] === b[j]) pairs.push([i++, j++]);
    else if (lengths[(i + 1) * width + j] >= lengths[i * width + j + 1]) i++;
    else j++;
  }
  return pairs;
}
