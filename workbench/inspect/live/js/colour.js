// colour.js: values as colours that colour-blind readers can tell apart, and as a size (0 to 4) beside the colour.
// Sequential: cividis (Nuñez et al. 2018, sampled at ten points). Diverging: blue to orange. Categories: Okabe and Ito.

const CIVIDIS = [
  [0, 34, 78], [18, 53, 112], [59, 73, 108], [87, 93, 109], [112, 113, 115],
  [138, 134, 120], [165, 156, 116], [195, 179, 105], [225, 204, 85], [254, 232, 56],
];
const BLUE = [31, 95, 168];
const ORANGE = [232, 135, 43];
const CATEGORIES = [[136, 136, 136], [204, 121, 167], [86, 180, 233], [0, 158, 115], [240, 228, 66], [213, 94, 0], [0, 114, 178]];

/** share 0..1 -> {rgb, level}; 1 is the end that should be noticed. */
export function sequential(share) {
  const s = Math.min(1, Math.max(0, share));
  return { rgb: CIVIDIS[Math.round(s * 9)], alpha: 0.25 + 0.4 * s, level: Math.round(s * 4) };
}

/** share -1..1 -> {rgb, level}; blue below zero, orange above. */
export function diverging(share) {
  const s = Math.min(1, Math.max(-1, share));
  const size = Math.abs(s);
  return { rgb: s < 0 ? BLUE : ORANGE, alpha: 0.08 + 0.62 * size, level: Math.round(size * 4) };
}

export function category(index) {
  return { rgb: CATEGORIES[index % CATEGORIES.length], alpha: 0.28, level: 0 };
}

export function css(tone) {
  return `rgba(${tone.rgb.join(",")},${tone.alpha.toFixed(2)})`;
}
