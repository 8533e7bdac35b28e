// A line chart. In: series of points. Out: a figure that shows the values under the pointer. Waits for nothing.

import { h, number, svg } from "./dom.js";

const WIDTH = 460;
const HEIGHT = 190;
const EDGE = { left: 52, right: 10, top: 8, bottom: 24 };

// series: {name, colour, dashed, x: [], y: [] with null where unknown, band: [] half-widths or nothing, faint: y before smoothing}
export function lineChart(title, series, { xLabel = "step", named = false } = {}) {
  const points = series.flatMap((one) => one.y.map((y, i) => [one.x[i], y, one.band?.[i] ?? 0])).filter(([, y]) => y !== null);
  const caption = h("figcaption", {}, title);
  if (!points.length) return h("figure", { class: "chart" }, caption, h("p", { class: "note" }, "no values"));
  const xs = extent(points.map(([x]) => x));
  const ys = extent(points.flatMap(([, y, band]) => [y - band, y + band]));
  const toX = scale(xs, EDGE.left, WIDTH - EDGE.right);
  const toY = scale(ys, HEIGHT - EDGE.bottom, EDGE.top);
  const picture = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": summary(title, series) });
  for (const y of ticks(ys, 6)) {
    picture.append(
      svg("line", { class: "grid", x1: EDGE.left, x2: WIDTH - EDGE.right, y1: toY(y), y2: toY(y) }),
      svg("text", { class: "tick", x: EDGE.left - 6, y: toY(y) + 3.5, "text-anchor": "end" }, number(y, 3)));
  }
  for (const x of ticks(xs, 8)) {
    picture.append(svg("text", { class: "tick", x: toX(x), y: HEIGHT - 8, "text-anchor": "middle" }, number(x, 3)));
  }
  for (const one of series) {
    const colour = { "--colour": one.colour };
    if (one.band) picture.append(svg("path", { class: "band", d: area(one, toX, toY), vars: colour }));
    if (one.faint) picture.append(svg("path", { class: "line faint", d: path(one.x, one.faint, toX, toY), vars: colour }));
    picture.append(svg("path", { class: one.dashed ? "line dashed" : "line", d: path(one.x, one.y, toX, toY), vars: colour }));
    const known = one.y.map((y, i) => [one.x[i], y]).filter(([, y]) => y !== null);
    if (known.length === 1) picture.append(svg("circle", { class: "dot", cx: toX(known[0][0]), cy: toY(known[0][1]), r: 3, vars: colour }));
  }
  const figure = h("figure", { class: "chart" }, caption, picture, named ? h("p", { class: "legend" }, series.map((one) =>
    h("span", {}, h("i", { class: "swatch", vars: { "--colour": one.colour } }), ` ${one.name}`))) : null);
  follow(figure, picture, series, xs, toX, xLabel);
  return figure;
}

function follow(figure, picture, series, xs, toX, xLabel) {
  const cross = svg("line", { class: "cross", y1: EDGE.top, y2: HEIGHT - EDGE.bottom });
  const told = h("div", { class: "told", hidden: true });
  figure.append(told);
  picture.addEventListener("pointerleave", () => { cross.remove(); told.hidden = true; });
  picture.addEventListener("pointermove", (event) => {
    const box = picture.getBoundingClientRect();
    const share = ((event.clientX - box.left) / box.width * WIDTH - EDGE.left) / (WIDTH - EDGE.left - EDGE.right);
    const wanted = xs[0] + share * (xs[1] - xs[0]);
    const found = series.map((one) => ({ one, at: nearest(one.x, wanted) })).filter(({ at }) => at !== null);
    if (!found.length) return;
    const x = found[0].one.x[found[0].at];
    cross.setAttribute("x1", toX(x));
    cross.setAttribute("x2", toX(x));
    picture.append(cross);
    told.replaceChildren(h("b", {}, `${xLabel} ${number(x)}`), ...found.map(({ one, at }) =>
      h("span", {}, h("i", { vars: { "--colour": one.colour } }), `${one.name} ${number(one.y[at])}${one.band?.[at] ? ` ± ${number(one.band[at], 2)}` : ""}`)));
    told.hidden = false;
    told.style.setProperty("left", share > 0.5 ? "auto" : `${Math.max(0, share) * 80 + 14}%`);
    told.style.setProperty("right", share > 0.5 ? `${(1 - Math.min(1, share)) * 80 + 6}%` : "auto");
  });
}

function nearest(xs, wanted) {
  let best = null;
  for (let i = 0; i < xs.length; i += 1) {
    if (best === null || Math.abs(xs[i] - wanted) < Math.abs(xs[best] - wanted)) best = i;
  }
  return best;
}

function extent(values) {
  let [low, high] = [Infinity, -Infinity];
  for (const value of values) { low = Math.min(low, value); high = Math.max(high, value); }
  const pad = low === high ? Math.abs(low) * 0.1 || 0.5 : 0;
  return [low - pad, high + pad];
}

function scale([low, high], from, to) {
  return (value) => from + (value - low) / (high - low) * (to - from);
}

function ticks([low, high], count) {
  const rough = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= rough) ?? rough;
  const found = [];
  for (let value = Math.ceil(low / step) * step; value <= high + step * 1e-9; value += step) found.push(Math.abs(value) < step * 1e-9 ? 0 : value);
  return found;
}

function path(xs, ys, toX, toY) {
  let d = "";
  let drawing = false;
  ys.forEach((y, i) => {
    if (y === null) return;
    d += `${drawing ? "L" : "M"}${toX(xs[i]).toFixed(1)} ${toY(y).toFixed(1)}`;
    drawing = true;
  });
  return d;
}

function area(one, toX, toY) {
  const known = one.y.map((y, i) => [one.x[i], y, one.band[i] ?? 0]).filter(([, y]) => y !== null);
  const up = known.map(([x, y, band]) => `${toX(x).toFixed(1)} ${toY(y + band).toFixed(1)}`);
  const down = known.map(([x, y, band]) => `${toX(x).toFixed(1)} ${toY(y - band).toFixed(1)}`).reverse();
  return known.length ? `M${[...up, ...down].join("L")}Z` : "";
}

function summary(title, series) {
  const ends = series.map((one) => {
    const known = one.y.filter((y) => y !== null);
    return `${one.name} from ${number(known[0])} to ${number(known.at(-1))}`;
  });
  return `${title}: ${ends.join("; ")}`;
}
