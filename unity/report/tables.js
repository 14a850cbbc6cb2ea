// Tables that are sorted by the column that is chosen. A figure is a number, or a pair of the number and its text.
const TENSOR = /^\w+\[[\d,]*\]$/;
const figure = (cell) => (Array.isArray(cell) ? cell[0] : cell);
const shown = (cell) => String(Array.isArray(cell) ? cell[1] : cell);
const compare = (a, b) => (typeof a === "number" ? a - b : String(a).localeCompare(String(b)));

class Table {
  // `first`: rows that are shown until all are asked for; `pick`: what is done with a row that is chosen.
  constructor(columns, rows, first, pick) {
    [this.columns, this.rows, this.first, this.pick] = [columns, rows, first, pick];
    [this.column, this.up, this.all, this.chosen] = [-1, false, rows.length <= first + 5, null];
    this.numeric = columns.map((_, k) => rows.length > 0 && rows.every((row) => typeof figure(row[k]) === "number"));
    this.heads = columns.map((name, k) => this.head(name, k));
    this.body = make("tbody");
    this.more = make("button", { onclick: () => this.fill((this.all = true)) }, `all ${rows.length} rows`);
    const table = make("table", {}, make("thead", {}, make("tr", {}, ...this.heads)), this.body);
    this.element = make("div", { class: "scroll" }, table, this.more);
    this.fill();
  }

  head(name, k) {
    const attributes = { class: this.numeric[k] ? "number" : "", scope: "col" };
    return make("th", attributes, make("button", { onclick: () => this.sort(k) }, name));
  }

  sort(k) {
    this.up = this.column === k ? !this.up : !this.numeric[k];
    this.column = k;
    for (const head of this.heads) head.removeAttribute("aria-sort");
    this.heads[k].setAttribute("aria-sort", this.up ? "ascending" : "descending");
    this.fill();
  }

  sorted() {
    const k = this.column;
    if (k < 0) return this.rows;
    return [...this.rows].sort((a, b) => (this.up ? 1 : -1) * compare(figure(a[k]), figure(b[k])));
  }

  fill() {
    const rows = this.sorted();
    this.body.replaceChildren(...(this.all ? rows : rows.slice(0, this.first)).map((row) => this.line(row)));
    this.more.hidden = this.all;
  }

  line(row) {
    const kind = (k) => (this.numeric[k] ? "number" : TENSOR.test(shown(row[k])) ? "tensor" : "");
    const cells = this.columns.map((_, k) => make("td", { class: kind(k) }, shown(row[k])));
    if (!this.pick) return make("tr", {}, ...cells);
    const line = make("tr", { class: "pick", tabindex: 0, "aria-selected": String(row === this.chosen) }, ...cells);
    line.addEventListener("click", () => this.choose(row, line));
    line.addEventListener("keydown", (e) => this.key(e, line));
    return line;
  }

  choose(row, line) {
    this.chosen = row;
    for (const other of this.body.children) other.setAttribute("aria-selected", String(other === line));
    this.pick(row);
  }

  key(e, line) {
    const to = { ArrowDown: line.nextElementSibling, ArrowUp: line.previousElementSibling, Enter: line, " ": line }[e.key];
    if (!to) return;
    e.preventDefault();
    to.focus();
    to.click();
  }
}

const table = (columns, rows, { first = 25, pick = null } = {}) => new Table(columns, rows, first, pick).element;

function showTables() {
  const columns = ["kind", "×", "over", "bytes of one", "time of all", "why", "line"];
  const none = () => make("p", { class: "note" }, "None: no device needs anything of another.");
  at("talk").append(report.collectives.length ? table(columns, report.collectives) : none());
  at("by-line").append(table(["line", "computing, on one device", "computing", "communicating"], report.lines));
}
