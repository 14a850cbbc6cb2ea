// What holds a device's memory: one bar, and a table.
function showMemory() {
  const { memory } = report;
  const sum = memory.parts.reduce((n, [, bytes]) => n + bytes, 0) || 1;
  const parts = memory.parts.map(([why, bytes, text], k) => ({
    said: `${why}: ${text}`,
    part: (100 * bytes) / sum,
    tint: `var(--c${k % 9})`,
  }));
  const bars = parts.map((p) => make("div", { title: p.said, style: `width: ${p.part}%; background: ${p.tint}` }));
  at("holders").append(
    make("p", {}, `${memory.whole[1]} on each device, predicted.`),
    make("div", { class: "stack", role: "img", "aria-label": parts.map((p) => p.said).join(", ") }, ...bars),
    make("div", { class: "keys" }, ...parts.map((p) => make("span", {}, swatch(p.tint), p.said))),
    ...memory.less.map(([why, , text]) => make("p", { class: "quiet" }, `${text} of it lies ${why}, and is counted once.`)),
    ...(memory.offloaded ? [make("p", { class: "quiet" }, `${memory.offloaded[1]} more lie in the memory of the host.`)] : []),
    memory.missing
      ? make("p", { class: "note" }, memory.missing)
      : table(["held as", "made by", "line", "bytes"], memory.rows, { first: 15 }),
  );
}
