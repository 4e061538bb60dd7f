// When the page is drawn.

/** Run `work` once in the next animation frame. */
export function oncePerFrame(work) {
  let asked = false;
  return () => {
    if (asked) return;
    asked = true;
    requestAnimationFrame(() => {
      asked = false;
      work();
    });
  };
}

/** Run `work` in an animation frame, at most once in `interval_ms`. */
export function atMostEvery(interval_ms, work) {
  let last = -Infinity;
  let timer = 0;
  const frame = oncePerFrame(() => {
    timer = 0;
    last = performance.now();
    work();
  });
  return () => {
    timer ||= setTimeout(frame, Math.max(0, last + interval_ms - performance.now()));
  };
}
