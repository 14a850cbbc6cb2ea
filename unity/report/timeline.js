// When everything of a step runs: a row for what computes and for every link, drawn on a canvas that is zoomed in time.
// Times are in units of a hundred-thousandth of the step.
const ROW = 26;
const LABELS = 190;
const AXIS = 24;
const WHOLE = 1e5;
const KINDS = [
  ["forward", "--forward"],
  ["backward", "--backward"],
  ["computed or gathered again", "--again"],
  ["communicating", "--link"],
];

class Timeline {
  constructor({ rows, seconds, whole }) {
    [this.rows, this.second, this.lit, this.drag] = [rows, seconds / WHOLE, null, null];
    [this.unit, this.one] = unit("time", seconds);
    [this.from, this.to] = [0, WHOLE];
    this.height = AXIS + ROW * rows.length + 6;
    const keys = "Plus and minus zoom, arrow keys move, 0 shows all. A table of what takes the time follows.";
    this.canvas = make("canvas", {
      class: "bars",
      tabindex: 0,
      role: "img",
      "aria-label": `One step of ${whole}. ${keys}`,
    });
    this.canvas.style.height = `${this.height}px`;
    this.text = make("div", { class: "said", "aria-live": "polite" });
    this.listen();
  }

  get inside() {
    return this.canvas.clientWidth - LABELS - 10;
  }

  place(time) {
    return LABELS + ((time - this.from) / (this.to - this.from)) * this.inside;
  }

  when(x) {
    return this.from + ((x - LABELS) / this.inside) * (this.to - this.from);
  }

  show(from, to) {
    const length = Math.min(WHOLE, Math.max(to - from, 2));
    this.from = Math.min(Math.max(0, from), WHOLE - length);
    this.to = this.from + length;
    this.later();
  }

  zoom(factor, centre = (this.from + this.to) / 2) {
    this.show(centre - (centre - this.from) / factor, centre + (this.to - centre) / factor);
  }

  move(part) {
    const by = (this.to - this.from) * part;
    this.show(this.from + by, this.to + by);
  }

  later() {
    requestAnimationFrame(() => this.paint());
  }

  paint() {
    const ratio = devicePixelRatio || 1;
    [this.canvas.width, this.canvas.height] = [this.canvas.clientWidth * ratio, this.height * ratio];
    this.pen = this.canvas.getContext("2d");
    this.pen.scale(ratio, ratio);
    this.pen.font = "12px system-ui, sans-serif";
    this.tints = Object.fromEntries(
      ["--line", "--soft", "--ink", "--page", ...KINDS.map(([, t]) => t)].map((t) => [t, colour(t)]),
    );
    this.paintAxis();
    this.rows.forEach((row, k) => this.paintRow(row, AXIS + k * ROW));
  }

  paintAxis() {
    for (const tick of ticks((this.from * this.second) / this.one, (this.to * this.second) / this.one, 6)) {
      const x = this.place((tick * this.one) / this.second);
      if (x < LABELS || x > this.canvas.clientWidth) continue;
      this.pen.fillStyle = this.tints["--line"];
      this.pen.fillRect(x, 0, 1, this.height);
      this.pen.fillStyle = this.tints["--soft"];
      this.pen.fillText(`${tick} ${this.unit}`, x + 4, 15);
    }
  }

  paintRow(row, y) {
    const { pen } = this;
    pen.fillStyle = this.tints["--ink"];
    pen.fillText(row.name.slice(0, 22), 10, y + 16);
    pen.fillStyle = this.tints["--soft"];
    pen.fillText(row.busy, LABELS - 40, y + 16);
    this.clipped(LABELS, y, this.inside + 10, () => {
      for (const bar of row.bars) {
        if (bar[0] + bar[1] >= this.from && bar[0] <= this.to) this.paintBar(row, bar, y);
      }
    });
  }

  paintBar(row, bar, y) {
    const { pen } = this;
    const left = this.place(bar[0]);
    const length = Math.max(this.place(bar[0] + bar[1]) - left, 0.6);
    pen.fillStyle = this.tints[tintOf(row, said(bar[2]))];
    pen.globalAlpha = this.lit === null || this.lit === bar ? 1 : 0.55;
    pen.fillRect(left, y + 4, length > 3 ? length - 1 : length, ROW - 8);
    pen.globalAlpha = 1;
    if (length <= 60) return;
    this.clipped(left, y, length - 4, () => {
      pen.fillStyle = this.tints["--page"];
      pen.fillText(said(bar[2]), Math.max(left, LABELS) + 5, y + 17);
    });
  }

  clipped(x, y, width, paint) {
    this.pen.save();
    this.pen.beginPath();
    this.pen.rect(x, y, width, ROW);
    this.pen.clip();
    paint();
    this.pen.restore();
  }

  // Says what is under the pointer.
  point(x, y) {
    const row = this.rows[Math.floor((y - AXIS) / ROW)];
    const [time, near] = [this.when(x), (this.to - this.from) / this.inside];
    const found = row?.bars.find(([start, length]) => time >= start - near && time <= start + length + near) ?? null;
    if (found === this.lit) return;
    this.lit = found;
    const says = ([start, length, label]) =>
      `${said(label)}: ${spell(length * this.second)}, from ${spell(start * this.second)}`;
    this.text.textContent = found ? `${says(found)} on ${row.name}` : "";
    this.later();
  }

  listen() {
    const { canvas } = this;
    canvas.addEventListener("pointerdown", (e) => {
      this.drag = { x: e.clientX, from: this.from, to: this.to };
      canvas.setPointerCapture(e.pointerId);
    });
    canvas.addEventListener("pointerup", () => (this.drag = null));
    canvas.addEventListener("pointermove", (e) => {
      if (!this.drag) return this.point(e.offsetX, e.offsetY);
      const { x, from, to } = this.drag;
      const by = ((x - e.clientX) / this.inside) * (to - from);
      this.show(from + by, to + by);
    });
    const wheel = (e) => {
      if (!(e.ctrlKey || e.metaKey || document.activeElement === canvas)) return;
      e.preventDefault();
      this.zoom(Math.exp(-e.deltaY * 0.002), this.when(e.offsetX));
    };
    canvas.addEventListener("wheel", wheel, { passive: false });
    canvas.addEventListener("keydown", (e) => this.key(e));
    new ResizeObserver(() => this.later()).observe(canvas);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.later());
  }

  key(e) {
    const does = {
      "+": () => this.zoom(2),
      "=": () => this.zoom(2),
      "-": () => this.zoom(1 / 2),
      0: () => this.show(0, WHOLE),
      ArrowLeft: () => this.move(-0.2),
      ArrowRight: () => this.move(0.2),
    }[e.key];
    if (!does || e.ctrlKey || e.metaKey) return;
    e.preventDefault();
    does();
  }
}

function tintOf(row, label) {
  if (row.kind === "link" || /^(all-|reduce-scatter|collective-)/.test(label)) return "--link";
  return label.endsWith(", backward") ? "--backward" : label.endsWith(", again") ? "--again" : "--forward";
}

const spell = (seconds) => {
  const [name, one] = unit("time", seconds);
  return `${Number((seconds / one).toPrecision(3))} ${name}`;
};

function showTimeline() {
  const { timeline } = report;
  const host = at("bars");
  if (timeline.missing) return host.append(make("p", { class: "note" }, timeline.missing));
  if (!timeline.rows.length) return host.append(make("p", { class: "note" }, "A step takes no time."));
  const shown = new Timeline(timeline);
  const button = (label, text, onclick) => make("button", { "aria-label": label, onclick }, text);
  const bar = make(
    "div",
    { class: "bar" },
    make("span", {}, `${timeline.whole}, simulated`),
    make("span", { class: "fill" }),
  );
  bar.append(
    button("Zoom out", "−", () => shown.zoom(1 / 2)),
    button("Zoom in", "+", () => shown.zoom(2)),
  );
  bar.append(button("Show all", "all", () => shown.show(0, WHOLE)));
  const keys = KINDS.map(([name, tint]) => make("span", {}, swatch(`var(${tint})`), name));
  host.append(bar, shown.canvas, shown.text, make("div", { class: "keys" }, ...keys), ...leftOut(timeline.left));
  host.append(make("h3", {}, "What takes the time"), summed(timeline));
}

function leftOut([rows, bars]) {
  const said = [rows ? `${rows} rows that are less busy` : "", bars ? `the ${bars} shortest bars` : ""].filter(Boolean);
  return said.length ? [make("p", { class: "note" }, `Left out: ${said.join(" and ")}.`)] : [];
}

// A table of what takes the time: equal labels together.
function summed({ rows, seconds }) {
  const found = new Map();
  for (const row of rows) {
    const where = row.kind === "link" ? "links" : "computing";
    for (const [, length, label] of row.bars) {
      if (!found.has(label)) found.set(label, [said(label), where, 0, 0]);
      found.get(label)[2] += 1;
      found.get(label)[3] += (length * seconds) / WHOLE;
    }
  }
  const data = [...found.values()].sort((a, b) => b[3] - a[3]);
  const shown = data.map(([label, where, count, sum]) => [label, where, count, [sum, spell(sum)]]);
  return table(["what", "where", "×", "time"], shown, { first: 10 });
}
