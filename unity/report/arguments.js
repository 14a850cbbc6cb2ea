// Who holds which slice: a tensor cut into slices beside the devices, in the colours of what they hold.
const WIDE = 280;
const SQUARE = 34;

function showArguments() {
  const rows = report.arguments.map((a, k) => [a.name, a.count, a.tensor, a.held, a.whole, a.here, k]);
  if (!rows.length) return at("held").append(make("p", { class: "note" }, "The function takes no arguments."));
  const columns = ["argument", "×", "shape", "held as", "bytes", "on a device"];
  at("held").append(table(columns, rows, { first: 20, pick: (row) => new Held(report.arguments[row[6]]).show() }));
  at("held").querySelector("tr.pick")?.click();
}

const product = (numbers) => numbers.reduce((n, m) => n * m, 1);

// Numbers in order, those that follow each other by the first and the last.
function ranges(numbers) {
  const found = [];
  for (const n of numbers) {
    if (found.length && found.at(-1)[1] === n - 1) found.at(-1)[1] = n;
    else found.push([n, n]);
  }
  const text = found.map(([a, b]) => (a === b ? `${a}` : `${a}–${b}`));
  return text.length > 6 ? `${text.slice(0, 5).join(", ")}, … (${numbers.length})` : text.join(", ");
}

class Held {
  constructor(argument) {
    this.argument = argument;
    this.count = product(argument.slices);
    this.holders = Array.from({ length: this.count }, () => []);
    argument.devices.forEach((slice, device) => this.holders[slice].push(device));
    this.text = make("p", { class: "quiet" });
    [this.cells, this.squares] = [[], []];
  }

  show() {
    const { name, tensor, type, held, devices } = this.argument;
    const many = this.holders[0].length === 1 ? "one device" : `${this.holders[0].length} devices`;
    const said = this.count === 1 ? "One piece, whole on every device:" : `In ${this.count} slices, each on ${many}:`;
    at("devices").replaceChildren(
      make("h3", {}, name),
      make("p", {}, make("code", {}, `${tensor} ${type}`)),
      make("p", { class: "quiet" }, held),
      make("p", {}, said),
      this.drawSlices(),
      make("p", {}, "Devices, each in the colour of the slice that it holds:"),
      this.drawDevices(devices),
      this.text,
    );
  }

  // The last dimension that is cut goes to the right, all before it down.
  drawSlices() {
    const cut = this.argument.slices.filter((n) => n > 1);
    const across = cut.length > 1 ? cut.at(-1) : 1;
    const down = this.count / across;
    const height = Math.min(220, Math.max(60, down * 18));
    const [w, h] = [WIDE / across, height / down];
    this.cells = this.holders.map((devices, slice) =>
      this.cell((slice % across) * w, Math.floor(slice / across) * h, w, h, slice, ranges(devices)),
    );
    return grid(height, `${this.count} slices`, this.cells);
  }

  // A row for each group of the outermost level, in several blocks if there are many.
  drawDevices(devices) {
    const outer = report.mesh.filter(([, , level]) => level === report.mesh[0][2]).map(([, size]) => size);
    const groups = product(outer);
    const row = groups < devices.length ? devices.length / groups : Math.min(8, devices.length);
    const rows = Math.ceil(devices.length / row);
    const blocks = Math.max(1, Math.min(Math.floor(16 / row), Math.ceil(rows / 12)));
    const side = Math.min(WIDE / (row * blocks + (blocks - 1) * 0.6), SQUARE);
    const long = Math.ceil(rows / blocks);
    this.squares = devices.map((slice, device) => {
      const at = Math.floor(device / row);
      const x = Math.floor(at / long) * (row + 0.6) + (device % row);
      return this.cell(x * side, (at % long) * side, side, side, slice, String(device));
    });
    return grid(long * side, `${devices.length} devices`, this.squares);
  }

  cell(x, y, width, height, slice, label) {
    const fill = this.count === 1 ? "var(--c8)" : `hsl(${(slice / this.count) * 300 + 200} 45% var(--light))`;
    const [onpointerenter, onpointerleave] = [() => this.light(slice), () => this.light(null)];
    const rect = draw("rect", { x, y, width, height, rx: 2, style: `fill: ${fill}`, onpointerenter, onpointerleave });
    const fits = width > 6.2 * label.length && height > 12;
    return draw("g", {}, rect, fits ? draw("text", { x: x + width / 2, y: y + height / 2 + 3.5 }, label) : null);
  }

  light(slice) {
    this.cells.forEach((cell, k) => cell.classList.toggle("lit", k === slice));
    this.squares.forEach((square, device) => square.classList.toggle("lit", this.argument.devices[device] === slice));
    this.text.textContent = slice === null ? "" : this.said(slice);
  }

  said(slice) {
    const devices = this.holders[slice];
    return `${this.span(slice)} is on ${devices.length === 1 ? "device" : "devices"} ${ranges(devices)}`;
  }

  // A slice as numpy writes it.
  span(slice) {
    const { shape, slices } = this.argument;
    const one = (n, d) => {
      const index = Math.floor(slice / product(slices.slice(d + 1))) % slices[d];
      const size = n / slices[d];
      return slices[d] === 1 ? ":" : `${size * index}:${size * (index + 1)}`;
    };
    return `[${shape.map(one).join(", ")}]`;
  }
}

const grid = (height, label, cells) =>
  draw(
    "svg",
    { class: "grid", viewBox: `0 0 ${WIDE} ${height}`, width: WIDE, height, role: "img", "aria-label": label },
    ...cells,
  );
