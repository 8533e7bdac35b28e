// A figure that can be zoomed, have a logarithmic axis, and be saved as PNG or CSV: uPlot (vendor/) with colors, buttons
// and keys.

import { h, number, save } from "./dom.js";

const HEIGHT = 180;
const plots = new WeakMap();  // node -> uPlot
let colours = new Map();

// A canvas takes no variables of CSS, nor light-dark(): what an element of that colour has is taken instead.
export function paint(colour, percent = 100) {
  const wanted = `color-mix(in srgb, ${colour} ${percent}%, transparent)`;
  if (!colours.has(wanted)) {
    const probe = h("i", { vars: { color: wanted } });
    document.body.append(probe);
    colours.set(wanted, getComputedStyle(probe).color);
    probe.remove();
  }
  return colours.get(wanted);
}

// Draw all figures again, once the theme has changed.
export function repaint() {
  colours = new Map();
  for (const node of document.querySelectorAll(".plot")) plots.get(node)?.redraw(false);
}

// A figure, empty until `show` is given what is drawn: {options and data of uPlot, summary in words, told(plot) under the
// pointer, table() for CSV, legend: [[name, colour]]}, as a function of whether the axis is logarithmic.
// Zoom and axis stay as they are when something else is shown.
export function figure(title, { log: canLog = false, named = false, height = HEIGHT } = {}) {
  let describe = null;
  let shown = null;
  let plot = null;
  let zoom = null;
  let log = false;
  let inSight = false;
  const button = (text, label, click) => h("button", { type: "button", "aria-label": `${label} of ${title}`, title: label, click }, text);
  const logs = button("log", "logarithmic axis", () => { log = !log; draw(); });
  const whole = button("all", "whole range", () => scale(null));
  const picture = button("png", "save as PNG", () => savePicture(plot, title, shown.legend));
  const tools = h("span", { class: "tools" }, whole, canLog ? logs : null, picture,
    button("csv", "save as CSV", () => save(new Blob([csv(shown.table())], { type: "text/csv" }), `${fileName(title)}.csv`)));
  const box = h("div", { class: "plot", role: "img", tabindex: "0", keydown: typed, vars: { "--height": `${height}px` } });
  const told = h("div", { class: "told", role: "status", hidden: true });
  const legend = h("p", { class: "legend" });
  const empty = h("p", { class: "note" });
  const node = h("figure", { class: "chart" }, h("figcaption", {}, h("span", {}, title), tools), box, empty, told, legend);

  // Sizes are known once it is on the page, and change with the window. A figure that is taken off the page has no size:
  // then the plot ends, since uPlot keeps a list of all that live.
  new ResizeObserver(() => {
    if (plot && box.clientWidth) plot.setSize({ width: box.clientWidth, height });
    else draw();
  }).observe(box);
  // Of a hundred charts a few are in sight, and only those are drawn: a plot costs milliseconds, its texts do not.
  new IntersectionObserver((entries) => {
    inSight = entries.at(-1).isIntersecting;
    if (inSight && !plot) draw();
  }, { rootMargin: "200px" }).observe(box); // before its caption is seen, whose buttons need it

  function draw() {
    if (!describe) return;
    plot?.destroy();
    [plot, shown] = [null, describe(log)];
    const nothing = !shown.data;
    [empty.hidden, box.hidden, picture.disabled, told.hidden] = [!nothing, nothing, nothing, true];
    [tools.hidden, whole.hidden, legend.hidden] = [nothing && !log, nothing || zoom === null, nothing || !named];
    empty.textContent = log ? "no value is above 0" : "no values";
    logs.setAttribute("aria-pressed", String(log));
    box.setAttribute("aria-label", `${title}: ${shown.summary}`);
    legend.replaceChildren(...shown.legend.map(([name, colour]) => h("span", {}, h("i", { class: "swatch", vars: { "--colour": colour } }), ` ${name}`)));
    if (nothing || !inSight || !box.clientWidth) return;
    plot = new uPlot(withDefaults(shown.options, box.clientWidth), shown.data, box);
    plots.set(box, plot);
    if (zoom) plot.setScale("x", { min: zoom[0], max: zoom[1] });
  }

  function withDefaults({ axes = [{}, {}], cursor, hooks, ...more }, width) {
    const font = "11px system-ui, \"Segoe UI\", \"DejaVu Sans\", sans-serif";
    const quiet = () => paint("var(--quiet)");
    const axis = { font, stroke: quiet, ticks: { show: false }, grid: { stroke: () => paint("var(--line)"), width: 1 }, values: (_, at) => at.map((value) => (value === null ? "" : number(value, 3))) };
    return {
      width, height, legend: { show: false }, padding: [6, 10, 0, 0], ...more,
      axes: [{ ...axis, size: 26, grid: { show: false }, ...axes[0] }, { ...axis, size: 56, ...axes[1] }],
      cursor: { y: false, points: { show: false }, hover: { skip: [null, undefined] }, drag: { x: true, y: false, dist: 4 }, ...cursor },
      hooks: { setScale: [(own, key) => { if (key === "x") remember(own); }], setCursor: [follow], ...hooks },
    };
  }

  function remember(own) {
    const [first, last] = [own.data[0][0], own.data[0].at(-1)];
    const { min, max } = own.scales.x;
    zoom = min <= first && max >= last ? null : [min, max];
    whole.hidden = zoom === null;
  }

  function scale(range) {
    const xs = plot.data[0];
    const [min, max] = range ?? [xs[0], xs.at(-1)];
    plot.setScale("x", { min: Math.max(min, xs[0]), max: Math.min(max, xs.at(-1)) });
  }

  function follow(own) {
    const { left } = own.cursor;
    const lines = left >= 0 ? shown.told(own) : [];
    told.hidden = !lines.length;
    if (!lines.length) return;
    const share = left / own.over.clientWidth;
    told.replaceChildren(...lines);
    told.style.setProperty("left", share > 0.5 ? "auto" : `${share * 80 + 14}%`);
    told.style.setProperty("right", share > 0.5 ? `${(1 - share) * 80 + 6}%` : "auto");
  }

  // Keys on the figure itself: arrows move the pointer's line from point to point, + and - zoom around it, 0 shows all.
  function typed(event) {
    if (!plot || event.ctrlKey || event.metaKey || event.altKey) return;
    const xs = plot.data[0];
    const { min, max } = plot.scales.x;
    const at = plot.cursor.left >= 0 ? plot.cursor.idx : null;
    const middle = at === null ? (min + max) / 2 : xs[at];
    const zoomed = (factor) => scale([middle - (middle - min) * factor, middle + (max - middle) * factor]);
    const act = {
      "ArrowRight": () => move(at === null ? plot.valToIdx(min) : at + 1), "ArrowLeft": () => move(at === null ? plot.valToIdx(max) : at - 1),
      "+": () => zoomed(0.5), "=": () => zoomed(0.5), "-": () => zoomed(2), "0": () => scale(null),
    }[event.key];
    if (!act) return;
    event.preventDefault();
    event.stopPropagation();
    act();
  }

  function move(wanted) {
    const xs = plot.data[0];
    const x = xs[Math.min(xs.length - 1, Math.max(0, wanted))];
    const { min, max } = plot.scales.x;
    if (x < min || x > max) scale([min + x - (x < min ? min : max), max + x - (x < min ? min : max)]);
    // the new scale is taken over in a microtask, and only then has x a place
    queueMicrotask(() => plot?.setCursor({ left: plot.valToPos(x, "x"), top: 8 }));
  }

  return {
    node,
    show(content) {
      describe = content;
      draw();
      return node;
    },
  };
}

// A chart of lines. Series: {name, colour, dashed, x: [], y: [] with null where unknown, band: [] half-widths or nothing,
// faint: y before smoothing}. A logarithmic axis leaves out what is not above 0.
export function lineChart(title, { named = false } = {}) {
  const frame = figure(title, { log: true, named });
  return { node: frame.node, show: (series) => frame.show((log) => lines(series, log)) };
}

function lines(series, log) {
  const fits = (y) => (y === null || y === undefined || (log && y <= 0) ? null : y);
  const known = series.map((one) => one.y.map(fits).filter((y) => y !== null));
  const table = () => [
    ["step", ...series.flatMap((one) => [one.name, ...(one.band ? [`${one.name} ±`] : []), ...(one.faint ? [`${one.name}, not smoothed`] : [])])],
    ...transposed(uPlot.join(series.map((one) => [one.x, one.y, ...[one.band, one.faint].filter(Boolean)]))),
  ];
  const ends = series.map((one, at) => `${one.name} from ${number(known[at][0])} to ${number(known[at].at(-1))}`);
  const said = { summary: ends.join("; "), table, legend: series.map(({ name, colour }) => [name, colour]) };
  if (!known.some((values) => values.length)) return { ...said, data: null };
  const options = { series: [{}], bands: [], scales: { x: { time: false }, y: log ? { distr: 3 } : { range: around } } };
  const drawn = [];  // the line of each series in uPlot's numbering
  const columns = series.map((one, at) => {
    const hidden = { width: 0, spanGaps: true, points: { show: false } };
    drawn.push(options.series.length);
    options.series.push({ stroke: () => paint(one.colour), width: 1.8, dash: one.dashed ? [6, 3] : undefined, spanGaps: true, points: { show: known[at].length === 1, fill: () => paint(one.colour) } });
    const more = [];
    if (one.band) {
      const top = options.series.push(hidden, hidden) - 2;
      options.bands.push({ series: [top, top + 1], fill: () => paint(one.colour, 15) });
      const edge = (sign) => one.y.map((y, i) => (fits(y) === null ? null : fits(y + sign * (one.band[i] ?? 0))));
      more.push(edge(1), edge(-1));
    }
    if (one.faint) {
      options.series.push({ ...hidden, width: 1, stroke: () => paint(one.colour, 25) });
      more.push(one.faint.map(fits));
    }
    return [one.x, one.y.map(fits), ...more];
  });
  const tell = (plot) => {
    const found = series.map((one, at) => [one, plot.cursor.idxs[drawn[at]]]).filter(([, idx]) => idx !== null && idx !== undefined);
    if (!found.length) return [];
    const [, first] = found[0];
    return [h("b", {}, `step ${number(plot.data[0][first])}`), ...found.map(([one, idx]) => {
      const own = one.x.indexOf(plot.data[0][idx]);
      return h("span", {}, h("i", { vars: { "--colour": one.colour } }), `${one.name} ${number(one.y[own])}${one.band?.[own] ? ` ± ${number(one.band[own], 2)}` : ""}`);
    })];
  };
  return { ...said, options, data: uPlot.join(columns), told: tell };
}

// uPlot would show a value that never moves on an axis from 0 to its double, and 0 on one up to 100.
function around(_, low, high) {
  if (low === null) return [null, null];
  const pad = Math.abs(low) * 0.1 || 0.5;
  return low === high ? [low - pad, high + pad] : uPlot.rangeNum(low, high, 0.1, true);
}

function transposed(columns) {
  return columns[0].map((_, row) => columns.map((column) => column[row]));
}

// A cell that begins as a formula does is text for a spreadsheet, too: names are whatever a run's files say.
function csv(rows) {
  const cell = (value) => (typeof value === "string" ? `"${value.replace(/^[=+\-@\t\r]/, "'$&").replaceAll("\"", "\"\"")}"` : String(value ?? ""));
  return rows.map((row) => `${row.map(cell).join(",")}\n`).join("");
}

function fileName(title) {
  return title.replace(/[^\w.-]+/g, "_").slice(0, 80);
}

function savePicture(plot, title, legend) {
  const from = plot.ctx.canvas;
  const ratio = from.width / plot.width;
  const canvas = h("canvas", { width: from.width, height: from.height + 28 * ratio });
  const context = canvas.getContext("2d");
  context.fillStyle = paint("var(--card)");
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.font = `600 ${12 * ratio}px system-ui, sans-serif`;
  let x = 8 * ratio;
  for (const [text, colour] of [[title, "var(--ink)"], ...legend]) {
    context.fillStyle = paint(colour);
    context.fillText(text, x, 18 * ratio);
    x += context.measureText(text).width + 14 * ratio;
  }
  context.drawImage(from, 0, 28 * ratio);
  canvas.toBlob((blob) => save(blob, `${fileName(title)}.png`));
}
