// The frontier: memory to the right, time upwards; every point says what that plan is.
const UNITS = {
  time: [
    ["s", 1],
    ["ms", 1e-3],
    ["µs", 1e-6],
  ],
  memory: [
    ["GB", 1e9],
    ["MB", 1e6],
    ["kB", 1e3],
    ["B", 1],
  ],
};
const [WIDTH, HEIGHT, LEFT, BELOW] = [760, 360, 74, 46];

// The unit that suits a figure: its name, and what one is.
function unit(kind, largest) {
  return UNITS[kind].find(([, one]) => largest >= one) ?? UNITS[kind].at(-1);
}

// Round numbers between two.
function ticks(low, high, wanted = 5) {
  const rough = (high - low) / wanted || Math.abs(high) || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const by = [1, 2, 5, 10].find((m) => m * power >= rough) * power;
  const found = [];
  for (let t = Math.ceil(low / by) * by; t <= high + by * 1e-6; t += by) found.push(Number(t.toPrecision(12)));
  return found;
}

// Where values go between two places, with some room around them.
function scale(values, from, to) {
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const room = (high - low) * 0.06 || Math.abs(high) * 0.1 || 1;
  const [a, b] = [low - room, high + room];
  return { place: (v) => from + ((v - a) / (b - a)) * (to - from), ticks: ticks(a, b) };
}

function axes(points, x, y) {
  const [bytes, seconds] = ["memory", "time"].map((kind) => unit(kind, Math.max(...points.map((p) => p[kind]))));
  const number = (value, one) => String(Number((value / one).toPrecision(4)));
  const upright = (t) => [
    draw("line", { class: "axis", x1: x.place(t), x2: x.place(t), y1: 12, y2: HEIGHT - BELOW }),
    draw("text", { x: x.place(t), y: HEIGHT - BELOW + 18, "text-anchor": "middle" }, number(t, bytes[1])),
  ];
  const level = (t) => [
    draw("line", { class: "axis", x1: LEFT, x2: WIDTH - 12, y1: y.place(t), y2: y.place(t) }),
    draw("text", { x: LEFT - 8, y: y.place(t) + 4, "text-anchor": "end" }, number(t, seconds[1])),
  ];
  const below = { x: (LEFT + WIDTH) / 2, y: HEIGHT - 8, "text-anchor": "middle" };
  const beside = { transform: `translate(16,${(HEIGHT - BELOW) / 2}) rotate(-90)`, "text-anchor": "middle" };
  const names = [
    draw("text", below, `memory on each device (${bytes[0]})`),
    draw("text", beside, `one step (${seconds[0]})`),
  ];
  return [...x.ticks.flatMap(upright), ...y.ticks.flatMap(level), ...names];
}

function showFrontier() {
  const { points, exact, whole } = report.frontier;
  const x = scale(
    points.map((p) => p.memory),
    LEFT,
    WIDTH - 20,
  );
  const y = scale(
    points.map((p) => p.time),
    HEIGHT - BELOW,
    16,
  );
  const places = points.map((p) => [x.place(p.memory), y.place(p.time)]);
  const path = places.map(([u, v], k) => (k ? `V${v}H${u}` : `M${u} ${v}`)).join("");
  const walk = (e, k) => {
    const to = { Enter: k, " ": k, ArrowRight: k - 1, ArrowLeft: k + 1, ArrowUp: k + 1, ArrowDown: k - 1 }[e.key];
    if (to === undefined) return;
    e.preventDefault();
    dots[to]?.focus();
    if (dots[to]) choose(to);
  };
  const dots = points.map((p, k) =>
    draw("circle", {
      cx: places[k][0],
      cy: places[k][1],
      r: p.chosen ? 7 : 4.5,
      class: p.chosen ? "mine" : "",
      tabindex: 0,
      role: "button",
      "aria-label": `${p.chosen ? "this plan: " : ""}${p.says}`,
      onclick: () => choose(k),
      onkeydown: (e) => walk(e, k),
    }),
  );
  const choose = (k) => {
    dots.forEach((dot, j) => dot.classList.toggle("chosen", j === k));
    sayPoint(points[k], k);
  };
  const plot = { class: "plot", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "group", "aria-label": "Time against memory" };
  const few = "Some of the plans that no other beats in both: those that are soon found. plan.frontier searches for all.";
  const hull = "The convex hull of all plans, and those found between.";
  const all = exact ? "Every plan that no other beats in both." : whole ? hull : few;
  at("points").append(
    draw("svg", plot, ...axes(points, x, y), draw("path", { class: "front", d: path }), ...dots),
    make("p", { class: "quiet" }, all),
  );
  choose(points.findIndex((p) => p.chosen));
}

function sayPoint(point, k) {
  const differs = make("ul", {}, ...point.differs.map((number) => make("li", {}, said(number))));
  const otherwise = point.differs.length ? [make("p", { class: "quiet" }, "Otherwise than in this plan:"), differs] : [];
  const title = point.chosen ? "This plan" : report.frontier.whole ? `plan.frontier[${k}]` : "Another plan";
  at("point").replaceChildren(make("h3", {}, title), make("p", {}, point.says), ...otherwise);
}
