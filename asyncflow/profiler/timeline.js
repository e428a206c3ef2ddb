"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const $ = (id) => document.getElementById(id);
  const make = (tag, text = "", className = "") => {
    const element = document.createElement(tag);
    // Names come from a trace: they are text, never markup.
    element.textContent = text;
    if (className) element.className = className;
    return element;
  };

  const GUTTER = 168, AXIS = 26, GROUP = 24, LANE = 23, MEMORY = 44, RIGHT = 12;
  const STACK = 8 * LANE, THIN = 8, READABLE = 17, MOST_LINES = 300;
  const INK = "#141922";
  const PALETTE = data.colours.iterations, CONTROL_COLOUR = data.colours["control flow"], OTHERS = data.colours.others;

  // ---- Numbers as text -------------------------------------------------------------------------------------------

  const UNITS = [[1e9, "s"], [1e6, "ms"], [1e3, "µs"], [1, "ns"]];
  const unitOf = (ns) => UNITS.find(([scale]) => Math.abs(ns) >= scale) || UNITS[3];

  function duration(ns) {
    const [scale, unit] = unitOf(ns);
    const value = ns / scale;
    return `${unit === "ns" ? Math.round(value) : value.toFixed(value < 10 ? 3 : value < 100 ? 2 : 1)} ${unit}`;
  }

  function bytes(n) {
    const units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let power = 0;
    while (n >= 1024 && power < units.length - 1) { n /= 1024; power += 1; }
    return `${power ? n.toFixed(n < 10 ? 2 : 1) : n} ${units[power]}`;
  }

  const count = (n) => n.toLocaleString("en-US");
  const noun = (n, one, many = `${one}s`) => (n === 1 ? one : many);
  const percent = (fraction) => `${(fraction * 100).toFixed(1)} %`;

  // ---- The model: rows of the timeline, top to bottom ---------------------------------------------------------------

  const times = (column) => Float64Array.from(column);

  function laneRow(raw, extra) {
    const n = raw.start.length;
    const start = times(raw.start), span = times(raw.duration);
    const end = new Float64Array(n), busy = new Float64Array(n + 1);
    for (let i = 0; i < n; i++) { end[i] = start[i] + span[i]; busy[i + 1] = busy[i] + span[i]; }
    return { kind: "lane", label: raw.label, height: LANE, n, start, end, span, busy, matches: null, ...extra };
  }

  const groups = [];
  const deviceGroups = [];
  const firingLanes = [];
  const runNames = new Map();
  if (data.runs.length) {
    groups.push({
      name: "requests", closed: false,
      rows: data.runs.map((raw) => {
        raw.run.forEach((run, i) => runNames.set(run, raw.name[i]));
        return laneRow(raw, { kind: "runs", run: raw.run, name: raw.name, state: raw.status });
      }),
    });
  }
  for (const group of data.groups) {
    const rows = group.lanes.map((raw) => laneRow(raw, {
      device: group.device, queued: times(raw.queued), site: Int32Array.from(raw.site), tag: Int32Array.from(raw.tag),
      output: Int32Array.from(raw.output), run: raw.run, state: Int32Array.from(raw.status),
      behind: times(raw.behind), iterations: raw.iterations, attempt: raw.attempt,
    }));
    firingLanes.push(...rows);
    for (const memory of group.memory) {
      const nbytes = times(memory.nbytes), peak = nbytes.reduce((a, b) => Math.max(a, b), 0);
      if (peak > 0) rows.push({ kind: "memory", label: memory.label, height: MEMORY, time: times(memory.time), nbytes, peak });
    }
    deviceGroups.push({ name: group.device, closed: false, rows });
  }
  groups.push(...deviceGroups);

  // Transfers are lines between rows. As one row of their own, which is never laid out, they can be pointed at like slices.
  const transfers = (() => {
    const raw = data.transfers, start = times(raw.source.time), end = times(raw.target.time), n = start.length;
    return { kind: "transfer", n, start, end, span: end.map((time, i) => time - start[i]), ...raw, shown: true };
  })();
  for (const [side, list] of [["source", "sent"], ["target", "received"]]) {
    const { lane, index } = transfers[side];
    for (let k = 0; k < transfers.n; k++) {
      if (lane[k] < 0) continue;
      const row = firingLanes[lane[k]];
      row[list] ??= new Map();
      row[list].set(index[k], [...(row[list].get(index[k]) || []), k]);
    }
  }

  // A stack of many lanes of one kind must not push the next ones off the screen: its lanes get thinner.
  for (const { rows } of groups) {
    const stacks = new Map();
    for (const row of rows) if (row.kind !== "memory") {
      const name = row.label.replace(/ \d+$/, "");
      stacks.set(name, [...(stacks.get(name) || []), row]);
    }
    for (const [name, stack] of stacks) {
      const height = Math.max(THIN, Math.min(LANE, Math.floor(STACK / stack.length)));
      stack.forEach((row) => Object.assign(row, { height, caption: row.label }));
      if (height >= READABLE) continue;
      stack.forEach((row, i) => { row.caption = i ? "" : `${name} 1–${stack.length}`; });
    }
  }

  const wall = Math.max(data.wall, 1);
  const firingCount = firingLanes.reduce((sum, lane) => sum + lane.n, 0);
  const nodeOf = (site) => data.sites[site][0];
  const opOf = (site) => data.sites[site][1];

  // One record per (node, op): what the table shows, and the order the palette is dealt in.
  const nodeStats = (() => {
    const byName = new Map();
    const bySite = data.sites.map(([node, op]) => {
      const key = JSON.stringify([node, op]);
      if (!byName.has(key)) byName.set(key, { node, op, count: 0, total: 0, max: 0, waited: 0 });
      return byName.get(key);
    });
    for (const lane of firingLanes) {
      for (let i = 0; i < lane.n; i++) {
        const stats = bySite[lane.site[i]];
        stats.count += 1;
        stats.total += lane.span[i];
        stats.waited += lane.queued[i];
        if (lane.span[i] > stats.max) stats.max = lane.span[i];
      }
    }
    const list = [...byName.values()];
    const all = list.reduce((sum, stats) => sum + stats.total, 0) || 1;
    for (const stats of list) {
      stats.mean = stats.total / stats.count;
      stats.queued = stats.waited / stats.count;
      stats.share = stats.total / all;
    }
    return { list: list.sort((a, b) => b.total - a.total), bySite };
  })();

  // ---- Colours ------------------------------------------------------------------------------------------------------

  const siteColour = data.families.map((number) => data.legend[number][1]);
  nodeStats.bySite.forEach((stats, site) => { stats.colour = siteColour[site]; });

  /** The iteration of the outermost loop: 3 of "outer/3/inner/7". */
  function iterationOf(tag) {
    const part = tag.split("/").slice(1).find((text) => /^\d+$/.test(text));
    return part === undefined ? null : Number(part);
  }

  const iterations = data.tags.map(iterationOf);
  const tagColour = iterations.map((k) => (k === null ? CONTROL_COLOUR : PALETTE[k % PALETTE.length]));
  let colouring = "op";

  let theme = {};
  function readTheme() {
    const style = getComputedStyle(document.documentElement);
    for (const name of ["bg", "panel", "group", "line", "grid", "text", "muted", "accent", "dim", "error", "run", "memory"]) {
      theme[name] = style.getPropertyValue(`--${name}`).trim();
    }
  }

  const statusOf = (row, i) => (row.kind === "transfer" ? "ok" : row.kind === "runs" ? row.state[i] : data.statuses[row.state[i]]);
  function around(row, i) {
    if (row.attempt[i] > 1) return ` (attempt ${row.attempt[i]})`;
    if (opOf(row.site[i]) !== "loop") return "";
    return row.iterations[i] === null ? " (loop)" : ` (loop, ${count(row.iterations[i])} ${noun(row.iterations[i], "iteration")})`;
  }
  const nameOf = (row, i) => (row.kind === "transfer" ? data.tensors[row.tensor[i]] : row.kind === "runs" ? row.name[i] : nodeOf(row.site[i]) + around(row, i));

  function fillOf(row, i) {
    const status = statusOf(row, i);
    if (status === "error" || status === "deadline") return theme.error;
    if (row.kind === "transfer") return theme.accent;
    if (row.kind === "runs") return theme.run;
    return colouring === "iteration" ? tagColour[row.tag[i]] : siteColour[row.site[i]];
  }

  function inkOf(row, i) {
    if (fillOf(row, i) === theme.error) return "#fff";
    return row.kind === "runs" || statusOf(row, i) === "cancelled" ? theme.text : INK;
  }

  // ---- The view -----------------------------------------------------------------------------------------------------

  const canvas = $("timeline"), overview = $("overview");
  const pen = canvas.getContext("2d"), overviewPen = overview.getContext("2d");
  const view = { from: 0, to: 1, scroll: 0, width: 0, height: 0 };
  const layout = { rows: [], height: 0 };
  let selected = null, hovered = null, range = null, pattern = null, queuedFrame = 0, searching = false, crowded = false;

  const plotWidth = () => Math.max(1, view.width - GUTTER - RIGHT);
  const xOf = (time) => GUTTER + ((time - view.from) / (view.to - view.from)) * plotWidth();
  const timeOf = (x) => view.from + ((x - GUTTER) / plotWidth()) * (view.to - view.from);

  function show(from, to) {
    const margin = wall * 0.015, widest = wall + 2 * margin;
    const width = Math.min(Math.max(to - from, 20), Math.max(widest, 20));
    const middle = (from + to) / 2;
    view.from = Math.min(Math.max(middle - width / 2, -margin), Math.max(-margin, wall + margin - width));
    view.to = view.from + width;
    redraw();
  }

  const fit = () => show(-wall, 2 * wall);
  const pan = (fraction) => { const by = (view.to - view.from) * fraction; show(view.from + by, view.to + by); };

  function zoom(factor, x = GUTTER + plotWidth() / 2) {
    const anchor = timeOf(x), margin = wall * 0.015;
    const width = Math.min(Math.max((view.to - view.from) * factor, 20), wall + 2 * margin);
    const from = anchor - ((x - GUTTER) / plotWidth()) * width;
    show(from, from + width);
  }

  function scrollTo(y) {
    view.scroll = Math.max(0, Math.min(y, layout.height - (view.height - AXIS)));
    redraw();
  }

  function arrange() {
    layout.rows = [];
    let y = 0;
    for (const group of groups) {
      layout.rows.push({ kind: "group", group, y, height: GROUP });
      group.y = y;
      y += GROUP;
      if (group.closed) continue;
      for (const row of group.rows) {
        layout.rows.push(Object.assign(row, { y }));
        y += row.height;
      }
      y += 6;
    }
    layout.height = y;
    scrollTo(view.scroll);
  }

  function redraw() {
    if (!queuedFrame) queuedFrame = requestAnimationFrame(() => { queuedFrame = 0; draw(); });
  }

  // ---- Drawing ------------------------------------------------------------------------------------------------------

  /** First position k of `row` (of its `subset`, if given) that ends after `time`. Lanes never overlap: ends ascend. */
  function firstEndingAfter(row, time, subset, low = 0) {
    let high = subset ? subset.length : row.n;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (row.end[subset ? subset[middle] : middle] > time) high = middle; else low = middle + 1;
    }
    return low;
  }

  const labelWidths = new Map();
  function fitLabel(text, room) {
    if (room < 22) return "";
    let width = labelWidths.get(text);
    if (width === undefined) labelWidths.set(text, (width = pen.measureText(text).width));
    if (width <= room) return text;
    const tail = text.slice(text.lastIndexOf("/") + 1);
    if (tail !== text) return fitLabel(tail, room);
    const keep = Math.floor((text.length * (room - 8)) / width);
    return keep >= 2 ? `${text.slice(0, keep)}…` : "";
  }

  function hatch() {
    const tile = document.createElement("canvas");
    tile.width = tile.height = 8;
    const brush = tile.getContext("2d");
    brush.strokeStyle = theme.bg;
    brush.lineWidth = 2;
    brush.globalAlpha = 0.7;
    for (const shift of [-8, 0, 8]) { brush.beginPath(); brush.moveTo(shift, 8); brush.lineTo(shift + 8, 0); brush.stroke(); }
    return pen.createPattern(tile, "repeat");
  }

  /** Draws only what is visible, in O(pixels · log slices): slices thinner than a pixel share one column. */
  function drawSlices(row, y, subset, dim) {
    const size = subset ? subset.length : row.n;
    const perNs = plotWidth() / (view.to - view.from), gap = row.height < READABLE ? 1 : 2;
    const top = y + gap, height = row.height - 2 * gap;
    const left = GUTTER, right = GUTTER + plotWidth();
    let k = firstEndingAfter(row, view.from, subset);
    while (k < size) {
      const i = subset ? subset[k] : k;
      if (row.start[i] > view.to) break;
      const x0 = xOf(row.start[i]), x1 = xOf(row.end[i]);
      if (x1 - x0 < 1.5) {
        const column = Math.floor(x0), edge = timeOf(column + 1);
        const next = Math.max(k + 1, firstEndingAfter(row, edge, subset, k));
        const last = subset ? subset[next - 1] : next - 1;
        const covered = ((subset ? row.span[i] : row.busy[last + 1] - row.busy[i]) * perNs);
        pen.globalAlpha = dim ? 1 : Math.min(1, 0.45 + 0.55 * covered);
        pen.fillStyle = dim ? theme.dim : fillOf(row, i);
        pen.fillRect(column, top, subset ? 2 : 1, height);
        pen.globalAlpha = 1;
        k = next;
        continue;
      }
      drawSlice(row, i, Math.max(x0, left - 2), Math.min(x1, right + 2), top, height, dim);
      k += 1;
    }
  }

  function drawSlice(row, i, x0, x1, top, height, dim) {
    const width = x1 - x0 - (x1 - x0 > 4 ? 1 : 0), cancelled = statusOf(row, i) === "cancelled" && !dim;
    if (cancelled) pen.globalAlpha = 0.5;
    pen.fillStyle = dim ? theme.dim : fillOf(row, i);
    pen.beginPath();
    pen.roundRect(x0, top, width, height, width > 8 ? 3 : 0);
    pen.fill();
    if (cancelled) {
      pen.fillStyle = pattern;
      pen.fill();
      pen.globalAlpha = 1;
    }
    let label = row.height < READABLE ? "" : fitLabel(nameOf(row, i), width - 10);
    if (row.kind === "runs" && label.endsWith("…")) label = fitLabel(String(row.run[i]), width - 8);
    if (!label) return;
    pen.fillStyle = dim ? theme.muted : inkOf(row, i);
    pen.fillText(label, x0 + 5, top + height / 2 + 0.5);
  }

  function drawMemory(row, y) {
    const base = y + row.height - 4, reach = row.height - 10, peak = row.peak || 1;
    const level = (value) => base - (value / peak) * reach;
    let low = 0, high = row.time.length;
    while (low < high) { const middle = (low + high) >> 1; if (row.time[middle] > view.from) high = middle; else low = middle + 1; }
    let current = low > 0 ? row.nbytes[low - 1] : 0, k = low;
    pen.beginPath();
    pen.moveTo(GUTTER, base);
    pen.lineTo(GUTTER, level(current));
    const right = GUTTER + plotWidth();
    while (k < row.time.length && row.time[k] <= view.to) {
      // Samples within one pixel: its highest is what a reader looks for; the last one carries on.
      const x = xOf(row.time[k]), edge = timeOf(x + 1);
      let top = row.nbytes[k];
      pen.lineTo(x, level(current));
      while (k < row.time.length && row.time[k] <= edge) { top = Math.max(top, row.nbytes[k]); current = row.nbytes[k]; k += 1; }
      pen.lineTo(x, level(top));
      pen.lineTo(x, level(current));
    }
    pen.lineTo(Math.min(right, xOf(wall)), level(current));
    pen.lineTo(Math.min(right, xOf(wall)), base);
    pen.closePath();
    pen.globalAlpha = 0.45;
    pen.fillStyle = theme.memory;
    pen.fill();
    pen.globalAlpha = 1;
    pen.strokeStyle = theme.memory;
    pen.stroke();
  }

  function ticks() {
    const target = ((view.to - view.from) * 110) / plotWidth();
    const power = 10 ** Math.floor(Math.log10(target));
    const step = Math.max(1, power * ([1, 2, 5].find((m) => m * power >= target) || 10));
    const [scale, unit] = unitOf(Math.max(Math.abs(view.from), Math.abs(view.to)));
    const digits = Math.max(0, Math.ceil(Math.log10(scale / step) - 1e-9));
    const marks = [];
    for (let k = Math.ceil(view.from / step); k * step <= view.to; k++) {
      const time = k * step;
      if (time >= 0) marks.push([xOf(time), time === 0 ? "0" : `${(time / scale).toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits })} ${unit}`]);
    }
    return marks;
  }

  function draw() {
    const { width, height } = view;
    if (!width || !height) return;
    const marks = ticks();
    pen.clearRect(0, 0, width, height);
    pen.fillStyle = theme.bg;
    pen.fillRect(0, 0, width, height);
    pen.textBaseline = "middle";
    pen.lineWidth = 1;
    pen.font = "11px system-ui, sans-serif";
    pen.save();
    pen.beginPath();
    pen.rect(0, AXIS, width, height - AXIS);
    pen.clip();
    pen.fillStyle = theme.grid;
    for (const [x] of marks) pen.fillRect(Math.round(x), AXIS, 1, height);
    for (const row of layout.rows) {
      const y = AXIS + row.y - view.scroll;
      if (y > height || y + row.height < AXIS) continue;
      if (row.kind === "group") drawGroup(row, y); else drawRow(row, y);
    }
    drawTransfers();
    drawMarked();
    pen.restore();
    drawAxis(marks);
    drawScrollbar();
    drawOverviewWindow();
  }

  function drawGroup(row, y) {
    pen.fillStyle = theme.group;
    pen.fillRect(0, y, view.width, row.height);
    pen.fillStyle = theme.muted;
    const x = 12, middle = y + row.height / 2;
    pen.beginPath();
    if (row.group.closed) { pen.moveTo(x, middle - 4); pen.lineTo(x + 5, middle); pen.lineTo(x, middle + 4); }
    else { pen.moveTo(x - 1, middle - 2); pen.lineTo(x + 7, middle - 2); pen.lineTo(x + 3, middle + 3); }
    pen.fill();
    pen.fillStyle = theme.text;
    pen.font = "600 12px system-ui, sans-serif";
    pen.fillText(row.group.name, 26, middle + 0.5);
    pen.font = "11px system-ui, sans-serif";
  }

  function drawRow(row, y) {
    pen.save();
    pen.beginPath();
    pen.rect(GUTTER, y, view.width - GUTTER, row.height);
    pen.clip();
    if (row.kind === "memory") drawMemory(row, y);
    else {
      const dim = searching && row.kind === "lane";
      drawSlices(row, y, null, dim);
      if (dim) drawSlices(row, y, row.matches, false);
    }
    pen.restore();
    const middle = y + row.height / 2 + 0.5;
    pen.fillStyle = theme.text;
    const thin = row.height < READABLE;
    const isMemory = row.kind === "memory";
    pen.fillText(fitLabel(row.caption ?? row.label, isMemory ? GUTTER - 36 : 90), 26, thin ? y + 7 : isMemory ? middle - 9 : middle);
    pen.textAlign = "right";
    pen.fillStyle = theme.muted;
    if (isMemory) pen.fillText(`peak ${bytes(row.peak)}`, GUTTER - 10, middle + 9);
    else if (row.kind === "lane" && !thin) pen.fillText(percent(row.busy[row.n] / wall), GUTTER - 10, middle);
    pen.textAlign = "left";
    pen.fillStyle = theme.grid;
    if (!thin) pen.fillRect(0, y + row.height - 1, view.width, 1);
  }

  /** Where a transfer's end is on the canvas: at its firing, or at its device's name where it has none to be seen. */
  function endOf(side, k) {
    const { lane, group, time } = transfers[side], device = deviceGroups[group[k]];
    const row = device.closed || lane[k] < 0 ? null : firingLanes[lane[k]];
    return [xOf(time[k]), AXIS - view.scroll + (row ? row.y + row.height / 2 : device.y + GROUP / 2)];
  }

  /** Calls `visit` for each transfer in the window; of those that would be one line, for the first. */
  function visibleTransfers(visit) {
    if (!transfers.shown) return;
    const drawn = new Set(), wide = Math.ceil(view.width) + 4, rows = firingLanes.length + deviceGroups.length + 1;
    const pixel = (x) => Math.min(wide - 1, Math.max(0, Math.round(x) + 1));
    const place = (side, k) => (transfers[side].lane[k] < 0 ? firingLanes.length + transfers[side].group[k] : transfers[side].lane[k]);
    for (let k = 0; k < transfers.n; k++) {
      if (transfers.start[k] > view.to) break;
      if (transfers.end[k] < view.from) continue;
      const from = pixel(xOf(transfers.start[k])), to = pixel(xOf(transfers.end[k]));
      const line = ((place("source", k) * rows + place("target", k)) * wide + from) * wide + to;
      if (drawn.has(line)) continue;
      drawn.add(line);
      visit(k);
    }
  }

  function drawTransfers() {
    if (!transfers.n) return;
    pen.save();
    pen.beginPath();
    pen.rect(GUTTER, AXIS, view.width - GUTTER, view.height);
    pen.clip();
    let visible = 0;
    visibleTransfers(() => { visible += 1; });
    // A thicket of lines hides the slices and says nothing.
    crowded = visible > MOST_LINES;
    $("crowded").hidden = !crowded;
    const strength = Math.max(0.25, Math.min(0.75, 60 / Math.max(visible, 1)));
    if (!crowded) visibleTransfers((k) => {
      const tied = transfers.source.lane[k] >= 0 && transfers.target.lane[k] >= 0;
      pen.strokeStyle = pen.fillStyle = transfers.stall[k] ? theme.error : theme.text;
      pen.globalAlpha = tied ? strength : strength / 2;
      drawTransfer(k, 1);
    });
    pen.globalAlpha = 1;
    pen.strokeStyle = pen.fillStyle = theme.accent;
    for (const mark of [hovered, selected]) if (mark) for (const k of transfersOf(mark)) drawTransfer(k, 2);
    pen.restore();
  }

  function transfersOf({ row, i }) {
    if (row.kind === "transfer") return [i];
    return [...(row.sent?.get(i) || []), ...(row.received?.get(i) || [])];
  }

  function drawTransfer(k, weight) {
    const [x0, y0] = endOf("source", k), [x1, y1] = endOf("target", k);
    const angle = Math.atan2(y1 - y0, x1 - x0), size = 4 + weight;
    pen.lineWidth = weight;
    pen.beginPath();
    pen.moveTo(x0, y0);
    pen.lineTo(x1, y1);
    pen.stroke();
    pen.beginPath();
    pen.moveTo(x1, y1);
    for (const side of [-0.4, 0.4]) pen.lineTo(x1 - size * Math.cos(angle + side), y1 - size * Math.sin(angle + side));
    pen.fill();
  }

  /** The transfer whose line is under the cursor; with `ends`, only near where it starts or ends. */
  function transferAt(x, y, ends) {
    let best = null, nearest = 4;
    if (!crowded) visibleTransfers((k) => {
      const [x0, y0] = endOf("source", k), [x1, y1] = endOf("target", k);
      const dx = x1 - x0, dy = y1 - y0, length = dx * dx + dy * dy;
      const along = length ? Math.min(1, Math.max(0, ((x - x0) * dx + (y - y0) * dy) / length)) : 0;
      const distance = ends
        ? Math.min(Math.hypot(x - x0, y - y0), Math.hypot(x - x1, y - y1))
        : Math.hypot(x - x0 - along * dx, y - y0 - along * dy);
      if (distance < nearest) { nearest = distance; best = { row: transfers, i: k }; }
    });
    return best;
  }

  /** What is under the cursor: a slice, or a transfer; within a slice, a transfer only at its very end. */
  function markAt(x, y) {
    if (x < GUTTER || y < AXIS) return null;
    const slice = sliceAt(x, y);
    if (!slice) return transferAt(x, y, false);
    const width = (slice.row.span[slice.i] / (view.to - view.from)) * plotWidth();
    return (width > 16 && transferAt(x, y, true)) || slice;
  }

  /** Outlines of the slices under the cursor and selected, and how long the selected one queued. */
  function drawMarked() {
    pen.save();
    pen.beginPath();
    pen.rect(GUTTER, AXIS, view.width - GUTTER, view.height);
    pen.clip();
    for (const [mark, weight] of [[hovered, 1], [selected, 2]]) {
      if (!mark || !layout.rows.includes(mark.row)) continue;
      const { row, i } = mark, y = AXIS + row.y - view.scroll;
      const x0 = xOf(row.start[i]), x1 = Math.max(xOf(row.end[i]), x0 + 2);
      pen.strokeStyle = theme.text;
      pen.lineWidth = weight;
      pen.beginPath();
      pen.roundRect(x0 - 0.5, y + 1.5, x1 - x0, row.height - 3, 3);
      pen.stroke();
      if (row.kind !== "lane" || !row.queued[i]) continue;
      const from = xOf(row.start[i] - row.queued[i]), middle = y + row.height / 2;
      pen.lineWidth = 1.5;
      pen.setLineDash([3, 2]);
      pen.beginPath();
      pen.moveTo(from, middle);
      pen.lineTo(x0, middle);
      pen.stroke();
      pen.setLineDash([]);
      pen.beginPath();
      pen.moveTo(from, middle - 4);
      pen.lineTo(from, middle + 4);
      pen.stroke();
    }
    if (range) {
      pen.globalAlpha = 0.18;
      pen.fillStyle = theme.accent;
      pen.fillRect(Math.min(...range), AXIS, Math.abs(range[1] - range[0]), view.height);
      pen.globalAlpha = 1;
      pen.fillStyle = theme.accent;
      pen.fillText(duration(Math.abs(timeOf(range[1]) - timeOf(range[0]))), Math.min(...range) + 6, AXIS + 12);
    }
    pen.restore();
  }

  function drawAxis(marks) {
    pen.fillStyle = theme.bg;
    pen.fillRect(0, 0, view.width, AXIS);
    pen.fillStyle = theme.line;
    pen.fillRect(0, AXIS - 1, view.width, 1);
    pen.fillRect(GUTTER - 1, 0, 1, view.height);
    pen.fillStyle = theme.muted;
    pen.fillText(`window ${duration(view.to - view.from)}`, 12, AXIS / 2);
    for (const [x, label] of marks) {
      if (x > view.width - RIGHT - pen.measureText(label).width) continue;
      pen.fillStyle = theme.line;
      pen.fillRect(Math.round(x), AXIS - 7, 1, 6);
      pen.fillStyle = theme.muted;
      pen.fillText(label, Math.round(x) + 5, AXIS / 2);
    }
  }

  function drawScrollbar() {
    const room = view.height - AXIS;
    if (layout.height <= room) return;
    pen.globalAlpha = 0.5;
    pen.fillStyle = theme.muted;
    pen.beginPath();
    pen.roundRect(view.width - 8, AXIS + (view.scroll / layout.height) * room, 5, (room / layout.height) * room, 3);
    pen.fill();
    pen.globalAlpha = 1;
  }

  // ---- Overview: how busy each moment was, and the window shown -------------------------------------------------------

  let density = null;

  function measureDensity() {
    const bins = Math.max(1, Math.floor(plotWidth())), each = wall / bins;
    // Differences of a step function, summed up afterwards: a slice costs the same however wide it is.
    const whole = new Float64Array(bins + 2), part = new Float64Array(bins + 2);
    for (const lane of firingLanes) {
      for (let i = 0; i < lane.n; i++) {
        const a = lane.start[i] / each, b = lane.end[i] / each;
        const first = Math.min(bins - 1, Math.floor(a)), last = Math.min(bins - 1, Math.floor(b));
        if (first === last) { part[first] += b - a; continue; }
        part[first] += first + 1 - a;
        part[last] += b - last;
        whole[first + 1] += 1;
        whole[last] -= 1;
      }
    }
    density = new Float64Array(bins);
    let level = 0, peak = 0;
    for (let bin = 0; bin < bins; bin++) {
      level += whole[bin];
      density[bin] = level + part[bin];
      peak = Math.max(peak, density[bin]);
    }
    if (peak) for (let bin = 0; bin < bins; bin++) density[bin] /= peak;
  }

  function drawOverviewWindow() {
    const height = 40, width = plotWidth(), brush = overviewPen;
    const at = (time) => GUTTER + (Math.min(Math.max(time, 0), wall) / wall) * width;
    brush.clearRect(0, 0, view.width, height);
    brush.fillStyle = theme.panel;
    brush.fillRect(0, 0, view.width, height);
    brush.fillStyle = theme.muted;
    brush.font = "11px system-ui, sans-serif";
    brush.textBaseline = "middle";
    brush.fillText("overview", 12, height / 2);
    const from = at(view.from), to = Math.max(at(view.to), from + 3);
    brush.fillStyle = theme.bg;
    brush.fillRect(from, 0, to - from, height);
    for (let bin = 0; bin < density.length; bin++) {
      const x = GUTTER + bin, high = density[bin] * (height - 8);
      brush.fillStyle = x >= from && x <= to ? theme.accent : theme.line;
      if (high > 0) brush.fillRect(x, height - Math.max(1, high), 1, high);
    }
    brush.strokeStyle = theme.accent;
    brush.strokeRect(from + 0.5, 0.5, to - from - 1, height - 1);
  }

  // ---- Finding ------------------------------------------------------------------------------------------------------

  function rowAt(y) {
    const inside = y - AXIS + view.scroll;
    return y < AXIS ? null : layout.rows.find((row) => inside >= row.y && inside < row.y + row.height) || null;
  }

  /** The slice under the cursor, or the nearest within three pixels; matches win while searching. */
  function sliceAt(x, y) {
    const row = rowAt(y);
    if (!row || x < GUTTER || (row.kind !== "lane" && row.kind !== "runs")) return null;
    const reach = 3 * (view.to - view.from) / plotWidth(), time = timeOf(x);
    for (const subset of searching && row.kind === "lane" ? [row.matches, null] : [null]) {
      const size = subset ? subset.length : row.n;
      let best = null, nearest = Infinity;
      for (let k = firstEndingAfter(row, time - reach, subset); k < size; k++) {
        const i = subset ? subset[k] : k, distance = Math.max(row.start[i] - time, time - row.end[i], 0);
        if (row.start[i] > time + reach) break;
        if (distance < nearest) { nearest = distance; best = { row, i }; }
        if (!distance) break;
      }
      if (best) return best;
    }
    return null;
  }

  function search(text) {
    const box = $("search");
    let regex = null;
    box.removeAttribute("aria-invalid");
    box.title = "";
    try { if (text) regex = new RegExp(text, "i"); } catch (error) {
      box.setAttribute("aria-invalid", "true");
      box.title = String(error.message);
    }
    searching = regex !== null;
    let found = 0;
    if (searching) {
      const sites = data.sites.map(([node, op]) => regex.test(node) || regex.test(op));
      const tags = data.tags.map((tag) => tag !== "" && regex.test(tag));
      for (const lane of firingLanes) {
        const hits = [];
        for (let i = 0; i < lane.n; i++) if (sites[lane.site[i]] || tags[lane.tag[i]]) hits.push(i);
        lane.matches = Int32Array.from(hits);
        found += hits.length;
      }
    }
    $("matches").textContent = searching ? `${count(found)} found` : "";
    redraw();
  }

  function highlight(text) {
    $("search").value = text;
    search(text);
  }

  const exactly = (text) => `^${text.replace(/[.*+?^${}()|[\]\\]/g, "\\$&")}$`;

  /** The next (or previous) firing after the selection, in time, among those `wanted` on any lane. */
  function step(direction, wanted) {
    const from = selected ? selected.row.start[selected.i] : direction > 0 ? -1 : Infinity;
    const fromLane = selected ? firingLanes.indexOf(selected.row) : -1;
    let best = null, bestKey = null;
    firingLanes.forEach((row, lane) => {
      for (let i = 0; i < row.n; i++) {
        if (!wanted(row, i)) continue;
        const key = [row.start[i] * direction, lane * direction];
        const after = key[0] - from * direction || key[1] - fromLane * direction;
        if (after <= 0 || (row === selected?.row && i === selected?.i)) continue;
        if (!best || key[0] < bestKey[0] || (key[0] === bestKey[0] && key[1] < bestKey[1])) { best = { row, i }; bestKey = key; }
      }
    });
    if (best) { select(best); reveal(best); }
  }

  const stepNode = (direction) => {
    if (selected?.row.kind !== "lane") return;
    const stats = nodeStats.bySite[selected.row.site[selected.i]];
    step(direction, (row, i) => nodeStats.bySite[row.site[i]] === stats);
  };

  const matched = (row, i) => {
    const k = firstEndingAfter(row, row.start[i] - 1, row.matches);
    return row.matches.subarray(k, k + 4).includes(i);
  };

  function reveal({ row, i }) {
    for (const group of groups) if (group.closed && group.rows.includes(row)) { group.closed = false; arrange(); }
    const room = view.height - AXIS;
    if (row.y < view.scroll || row.y + row.height > view.scroll + room) scrollTo(row.y - room / 2);
    if (row.start[i] < view.from || row.end[i] > view.to) {
      const width = Math.max(view.to - view.from, row.span[i] * 1.5), middle = (row.start[i] + row.end[i]) / 2;
      show(middle - width / 2, middle + width / 2);
    }
    redraw();
  }

  function focusOn({ row, i }) {
    const margin = Math.max(row.span[i] * 0.75, 50);
    show(row.start[i] - margin, row.end[i] + margin);
  }

  // ---- Details, tooltip, legend, table ------------------------------------------------------------------------------

  /** When the value of a transfer was there: when its copy had ended, where there is one. */
  function arrivalOf(k) {
    const { lane, index } = transfers.target;
    return lane[k] < 0 ? transfers.end[k] : firingLanes[lane[k]].end[index[k]];
  }

  function facts({ row, i }) {
    const status = statusOf(row, i);
    const list = [];
    if (row.kind === "transfer") {
      const tag = data.tags[row.tag[i]], device = (side) => deviceGroups[row[side].group[i]].name;
      list.push(row.stall[i] ? ["Waited for", "a saved value that came back late"] : ["Transfer", `${device("source")} → ${device("target")}`]);
      if (tag) list.push(["Tag", tag, "mono"]);
      list.push(["Bytes", row.nbytes[i] ? bytes(row.nbytes[i]) : "0 (control edge)"], ["On its way", duration(arrivalOf(i) - row.start[i])]);
      list.push(["Run", runNames.get(row.run[i]) || String(row.run[i])]);
      return list;
    }
    if (row.kind === "runs") {
      list.push(["Status", status, status === "ok" ? "" : "status-error"], ["Started", duration(row.start[i])], ["Duration", duration(row.span[i])]);
      for (const [run, card, ...counts] of data.requests) if (run === row.run[i]) list.push([card, asked(counts)]);
      return list;
    }
    list.push(["Op", opOf(row.site[i])]);
    if (data.tags[row.tag[i]]) list.push(["Tag", data.tags[row.tag[i]], "mono"]);
    list.push(["Duration", duration(row.span[i])], ["Ready before", duration(row.queued[i])]);
    if (row.attempt[i]) list.push(["Attempt", String(row.attempt[i])]);
    if (row.behind[i]) list.push(["Queued", duration(row.behind[i])]);
    if (data.outputs[row.output[i]]) list.push(["Outputs", data.outputs[row.output[i]], "mono"]);
    for (const [which, side, verb] of [["received", "source", "Received from"], ["sent", "target", "Sent to"]]) {
      for (const k of row[which]?.get(i) || []) {
        const device = deviceGroups[transfers[side].group[k]].name;
        list.push([verb, `${device}, ${bytes(transfers.nbytes[k])}`]);
      }
    }
    list.push(["Run", runNames.get(row.run[i]) || String(row.run[i])]);
    if (status !== "ok") list.push(["Status", status, "status-error"]);
    if (data.sites[row.site[i]][2]) list.push(["Source", data.sites[row.site[i]][2], "mono"]);
    return list;
  }

  function asked([launches, graphs, copied, allocations]) {
    return `${count(launches)} launches, ${count(graphs)} graph launches, ${count(copied)} copies, ${count(allocations)} allocations`;
  }

  function definitions(list) {
    const dl = make("dl");
    for (const [term, text, className] of list) dl.append(make("dt", term), make("dd", text, className || ""));
    return dl;
  }

  function heading(level, mark) {
    const title = make(level), swatch = make("span", "", "swatch");
    swatch.style.background = fillOf(mark.row, mark.i);
    title.append(swatch, nameOf(mark.row, mark.i));
    return title;
  }

  function button(text, action) {
    const element = make("button", text);
    element.addEventListener("click", action);
    return element;
  }

  function select(mark) {
    selected = mark;
    const details = $("details");
    details.replaceChildren();
    redraw();
    if (!mark) {
      details.append(make("p", "Click a slice to see its node, tag, shapes and source line. Press ? for keys.", "hint"));
      return;
    }
    const list = facts(mark), actions = make("div", "", "actions");
    actions.append(button("Zoom to it", () => focusOn(mark)));
    if (mark.row.kind === "lane") {
      const stats = nodeStats.bySite[mark.row.site[mark.i]];
      list.push(["Lane", `${mark.row.device} · ${mark.row.label}`], ["Started", duration(mark.row.start[mark.i])]);
      list.push(["This node", `${count(stats.count)} ${noun(stats.count, "firing")}, ${duration(stats.total)} in all, mean ${duration(stats.mean)}, max ${duration(stats.max)}`]);
      actions.append(
        button("Highlight node", () => highlight(exactly(stats.node))),
        button("Previous firing", () => stepNode(-1)), button("Next firing", () => stepNode(1)),
      );
    } else if (mark.row.kind === "runs") {
      const run = mark.row.run[mark.i];
      const fired = firingLanes.reduce((sum, lane) => sum + lane.run.filter((other) => other === run).length, 0);
      list.push(["Firings", count(fired)]);
    }
    details.append(heading("h2", mark), actions, definitions(list));
  }

  function tooltip(mark, x, y) {
    const tip = $("tooltip");
    tip.hidden = !mark;
    if (!mark) return;
    tip.replaceChildren(heading("h3", mark), definitions(facts(mark)));
    const box = tip.getBoundingClientRect();
    tip.style.left = `${Math.max(4, Math.min(x + 14, innerWidth - box.width - 8))}px`;
    tip.style.top = `${y + 18 + box.height > innerHeight ? Math.max(4, y - box.height - 12) : y + 18}px`;
  }

  function legendKey(look, text) {
    const key = make("span", "", "key"), swatch = make("span", "", "swatch");
    swatch.style.background = look;
    key.append(swatch, text);
    $("legend").append(key);
  }

  function fillLegend() {
    $("legend").replaceChildren();
    const used = new Set(firingLanes.flatMap((lane) => [...new Set(lane.state)]).map((state) => data.statuses[state]));
    for (const [status, look] of [["error", "var(--error)"], ["cancelled", "repeating-linear-gradient(135deg, var(--muted) 0 2px, transparent 2px 4px)"]]) {
      if (used.has(status)) legendKey(look, status);
    }
    if (transfers.n) fillTransfers();
    if (colouring === "iteration") fillIterations(); else fillOps();
  }

  function fillTransfers() {
    const stalls = transfers.stall.filter(Boolean).length, sent = transfers.n - stalls;
    for (const [number, colour, text] of [[sent, "var(--text)", "transfers"], [stalls, "var(--error)", "waits for late copies"]]) {
      if (!number) continue;
      const swatch = make("span", "", "swatch line"), entry = button("", toggleTransfers);
      swatch.style.background = colour;
      entry.setAttribute("aria-pressed", String(transfers.shown));
      entry.title = "Show or hide transfers (t)";
      entry.append(swatch, `${count(number)} ${text}`);
      $("legend").append(entry);
    }
    const note = make("span", "zoom in to see them, or point at a slice", "key");
    note.id = "crowded";
    note.hidden = !crowded;
    $("legend").append(note);
  }

  function fillIterations() {
    const last = iterations.reduce((most, k) => Math.max(most, k ?? 0), 0), colours = PALETTE.length;
    for (let k = 0; k <= Math.min(last, colours - 1); k++) {
      legendKey(PALETTE[k], `${k}${k + colours <= last ? `, ${k + colours}${k + 2 * colours <= last ? ", …" : ""}` : ""}`);
    }
    legendKey(CONTROL_COLOUR, "outside loops");
  }

  function toggleTransfers() {
    transfers.shown = !transfers.shown;
    fillLegend();
    redraw();
  }

  function toggleColouring() {
    if (!iterations.some((k) => k !== null)) return;
    colouring = colouring === "op" ? "iteration" : "op";
    fillColouring();
  }

  function fillColouring() {
    $("colouring").hidden = !iterations.some((k) => k !== null);
    $("colouring").textContent = `Colour: ${colouring}`;
    fillLegend();
    redraw();
  }

  // What ran as a whole is found by its name: a loop, or what is between two.
  const WHOLE = new Set(["loop", "region"]);

  /** An entry of the legend that highlights the families of these numbers. */
  function legendEntry(numbers, colour, text) {
    const chosen = new Set(numbers), swatch = make("span", "", "swatch");
    swatch.style.background = colour;
    const members = data.sites.filter((_, site) => chosen.has(data.families[site]));
    const ops = [...new Set(members.map(([node, op]) => (WHOLE.has(op) ? node : op)))];
    const pattern = ops.length === 1 ? exactly(ops[0]) : `^(${ops.map((op) => exactly(op).slice(1, -1)).join("|")})$`;
    const entry = button("", () => highlight($("search").value === pattern ? "" : pattern));
    entry.append(swatch, text);
    $("legend").append(entry);
    return entry;
  }

  function fillOps() {
    const others = [];
    data.legend.forEach(([name, colour], number) => {
      if (colour === OTHERS) others.push(number); else legendEntry([number], colour, name);
    });
    if (others.length) {
      legendEntry(others, OTHERS, `${count(others.length)} others`).title = others.map((number) => data.legend[number][0]).join(", ");
    }
  }

  const order = { key: "total", sign: -1 };

  /** A name that breaks behind its slashes, where it has to, and inside of a part only where that is too long for a line. */
  function pathOf(name) {
    const path = make("bdi");
    name.split(/(?<=[/,])/).forEach((part) => path.append(part, document.createElement("wbr")));
    return [path];
  }

  function fillTable() {
    const { key, sign } = order;
    const compare = (a, b) => (typeof a[key] === "string" ? a[key].localeCompare(b[key]) : a[key] - b[key]) * sign;
    const rows = [...nodeStats.list].sort(compare).slice(0, 200).map((stats) => {
      const tr = make("tr"), node = make("td", "", "text node"), op = make("td", stats.op, "text op"), share = make("td");
      const swatch = make("span", "", "swatch"), bar = make("span", "", "share"), part = make("i");
      swatch.style.background = stats.colour;
      node.append(swatch, ...pathOf(stats.node), make("span", stats.op, "below"));
      part.style.width = `${stats.share * 100}%`;
      bar.append(part);
      share.append(bar, make("span", percent(stats.share), "figure"));
      tr.append(node, op, make("td", count(stats.count)), make("td", duration(stats.total)), share,
        make("td", duration(stats.mean)), make("td", duration(stats.max)), make("td", duration(stats.queued)));
      tr.addEventListener("click", () => highlight($("search").value === exactly(stats.node) ? "" : exactly(stats.node)));
      return tr;
    });
    document.querySelector("tbody").replaceChildren(...rows);
  }

  function fillStats() {
    const status = new Map();
    let inline = 0, awaited = 0, copies = 0;
    for (const group of data.groups) {
      for (const lane of group.lanes) {
        const stream = lane.label.replace(/ \d+$/, "");
        if (stream === "inline" || stream === "host") inline += lane.start.length;
        if (stream === "async") awaited += lane.start.length;
        if (["h2d", "d2h", "peer"].includes(stream)) copies += lane.start.length;
        for (const state of lane.status) status.set(data.statuses[state], (status.get(data.statuses[state]) || 0) + 1);
      }
    }
    const add = (value, label, bad = false) => {
      const item = make("li", "", bad ? "bad" : "");
      item.append(make("b", value), ` ${label}`);
      $("stats").append(item);
    };
    add(duration(data.wall), "wall");
    const runs = data.runs.reduce((sum, row) => sum + row.run.length, 0);
    add(count(runs), noun(runs, "run"));
    add(count(firingCount), noun(firingCount, "firing"));
    if (status.get("error")) add(count(status.get("error")), "failed", true);
    if (status.get("cancelled")) add(count(status.get("cancelled")), "cancelled");
    add(count(inline), "inline");
    add(count(firingCount - inline - awaited - copies), "offloaded");
    if (awaited) add(count(awaited), "awaited");
    if (copies) add(count(copies), noun(copies, "copy", "copies"));
    for (const [k, one, many] of [[2, "launch", "launches"], [3, "graph launch", "graph launches"], [5, "allocation"]]) {
      const total = data.requests.reduce((sum, each) => sum + each[k], 0);
      if (total) add(count(total), noun(total, one, many));
    }
    const sent = transfers.nbytes.reduce((sum, each, k) => sum + (transfers.stall[k] ? 0 : each), 0);
    if (sent) add(bytes(sent), "sent");
  }

  // ---- Input --------------------------------------------------------------------------------------------------------

  const at = (event) => [event.offsetX, event.offsetY];

  function listenTimeline() {
    let drag = null;
    canvas.addEventListener("pointerdown", (event) => {
      if (event.button) return;
      const [x, y] = at(event);
      canvas.setPointerCapture(event.pointerId);
      canvas.focus({ preventScroll: true });
      drag = { x, y, from: view.from, to: view.to, scroll: view.scroll, moved: false, range: event.shiftKey && x > GUTTER };
    });
    canvas.addEventListener("pointermove", (event) => {
      const [x, y] = at(event);
      if (!drag) return hover(event, x, y);
      drag.moved ||= Math.hypot(x - drag.x, y - drag.y) > 3;
      if (!drag.moved) return undefined;
      tooltip(null);
      canvas.classList.add("dragging");
      if (drag.range) { range = [drag.x, Math.max(GUTTER, x)]; return redraw(); }
      const by = ((drag.x - x) / plotWidth()) * (drag.to - drag.from);
      show(drag.from + by, drag.to + by);
      return scrollTo(drag.scroll + drag.y - y);
    });
    const release = (event) => {
      if (!drag) return;
      canvas.classList.remove("dragging");
      if (range && Math.abs(range[0] - range[1]) > 4) show(...range.map(timeOf).sort((a, b) => a - b));
      else if (!drag.moved && event.type === "pointerup") click(...at(event));
      range = drag = null;
      redraw();
    };
    canvas.addEventListener("pointerup", release);
    canvas.addEventListener("pointercancel", release);
    canvas.addEventListener("pointerleave", () => { hovered = null; tooltip(null); redraw(); });
    canvas.addEventListener("dblclick", (event) => { const mark = markAt(...at(event)); if (mark) focusOn(mark); });
    canvas.addEventListener("wheel", (event) => {
      event.preventDefault();
      const unit = event.deltaMode === 1 ? 16 : 1, dx = event.deltaX * unit, dy = event.deltaY * unit;
      if (event.offsetX < GUTTER) scrollTo(view.scroll + dy);
      else if (event.shiftKey || Math.abs(dx) > Math.abs(dy)) pan((event.shiftKey ? dx + dy : dx) / plotWidth());
      else zoom(Math.exp(Math.max(-240, Math.min(240, dy)) * 0.0022), event.offsetX);
      tooltip(null);
    }, { passive: false });
  }

  function hover(event, x, y) {
    const mark = markAt(x, y);
    canvas.classList.toggle("over", Boolean(mark) || rowAt(y)?.kind === "group");
    if (mark?.row !== hovered?.row || mark?.i !== hovered?.i) { hovered = mark; redraw(); }
    tooltip(mark, event.clientX, event.clientY);
  }

  function click(x, y) {
    const row = rowAt(y), mark = markAt(x, y);
    if (row?.kind === "group" && !mark) { row.group.closed = !row.group.closed; arrange(); } else select(mark);
  }

  function listenOverview() {
    const move = (event) => {
      if (!(event.buttons & 1)) return;
      const middle = ((event.offsetX - GUTTER) / plotWidth()) * wall, half = (view.to - view.from) / 2;
      show(middle - half, middle + half);
    };
    overview.addEventListener("pointerdown", (event) => { overview.setPointerCapture(event.pointerId); move(event); });
    overview.addEventListener("pointermove", move);
  }

  const KEYS = {
    ArrowLeft: () => pan(-0.15), ArrowRight: () => pan(0.15),
    ArrowUp: () => scrollTo(view.scroll - 2 * LANE), ArrowDown: () => scrollTo(view.scroll + 2 * LANE),
    "+": () => zoom(0.7), "=": () => zoom(0.7), "-": () => zoom(1 / 0.7), _: () => zoom(1 / 0.7), 0: fit,
    "/": () => { $("search").focus(); $("search").select(); },
    f: () => { if (selected) focusOn(selected); },
    c: toggleColouring, t: toggleTransfers,
    n: () => stepNode(1), p: () => stepNode(-1), "?": () => $("help").showModal(),
    Escape: () => { highlight(""); select(null); },
  };

  function listenKeys() {
    document.addEventListener("keydown", (event) => {
      if (event.target === $("search")) {
        if (event.key === "Enter" && searching) step(event.shiftKey ? -1 : 1, matched);
        if (event.key === "Escape") { highlight(""); canvas.focus(); }
        return;
      }
      if (event.ctrlKey || event.metaKey || event.altKey || $("help").open || !Object.hasOwn(KEYS, event.key)) return;
      event.preventDefault();
      KEYS[event.key]();
    });
    $("search").addEventListener("input", () => search($("search").value));
    $("zoom-in").addEventListener("click", () => zoom(0.7));
    $("zoom-out").addEventListener("click", () => zoom(1 / 0.7));
    $("fit").addEventListener("click", fit);
    $("colouring").addEventListener("click", toggleColouring);
    $("help-open").addEventListener("click", () => $("help").showModal());
    document.querySelectorAll("th").forEach((th) => th.addEventListener("click", () => {
      const key = th.dataset.key;
      order.sign = order.key === key ? -order.sign : th.classList.contains("text") ? 1 : -1;
      order.key = key;
      document.querySelectorAll("th").forEach((other) => other.removeAttribute("aria-sort"));
      th.setAttribute("aria-sort", order.sign < 0 ? "descending" : "ascending");
      fillTable();
    }));
  }

  function resize() {
    const ratio = window.devicePixelRatio || 1, before = view.width;
    for (const [surface, brush] of [[canvas, pen], [overview, overviewPen]]) {
      surface.width = Math.round(surface.clientWidth * ratio);
      surface.height = Math.round(surface.clientHeight * ratio);
      brush.setTransform(ratio, 0, 0, ratio, 0, 0);
    }
    view.width = canvas.clientWidth;
    view.height = canvas.clientHeight;
    if (view.width !== before) measureDensity();
    scrollTo(view.scroll);
    // At once, not in the next frame: setting a canvas's size cleared it.
    draw();
  }

  function retheme() {
    readTheme();
    pattern = hatch();
    redraw();
  }

  // ---- Start --------------------------------------------------------------------------------------------------------

  if (data.dropped) {
    $("notice").textContent = `${count(data.dropped)} ${noun(data.dropped, "firing")} did not fit the trace's capacity, and ${noun(data.dropped, "is", "are")} not shown.`;
    $("notice").hidden = false;
  }
  if (!groups.length) {
    $("empty").hidden = false;
    $("view").hidden = true;
    for (const part of [$("search-box"), document.querySelector(".buttons")]) part.hidden = true;
    return;
  }
  retheme();
  fillStats();
  fillColouring();
  fillTable();
  select(null);
  listenTimeline();
  listenOverview();
  listenKeys();
  arrange();
  new ResizeObserver(resize).observe(canvas);
  resize();
  fit();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", retheme);
})();
