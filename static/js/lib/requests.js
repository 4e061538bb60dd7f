// Requests whose answers must not replace newer ones.

/** Return a debounced request function: it sends `question()` after a delay in ms. Only the newest
 *  request calls `answered` or `failed`, and none does once another one is due. */
export function asker(question, answered, failed) {
  let newest = 0;
  let timer = 0;
  async function ask() {
    const number = ++newest;
    const [report, answer] = await question().then(
      (response) => [answered, response],
      () => [failed],
    );
    if (number === newest) report(answer);
  }
  return (delay_ms) => {
    clearTimeout(timer);
    newest++; // a request under way asked about earlier input
    timer = setTimeout(ask, delay_ms);
  };
}

/** Wrap a request so that one is under way at a time. A call meanwhile gets the answer of the next
 *  one, which begins after it: the answer under way can be older than what the caller knows. */
export function oneAtATime(request) {
  let running = null;
  let next = null;
  function begin() {
    next = null;
    running = request().finally(() => (running = null));
    return running;
  }
  return () => {
    if (!running && !next) return begin();
    next ??= running.then(begin, begin);
    return next;
  };
}

/** Wrap a request: an answer that arrives after that of a later request is undefined. */
export function inOrder(request) {
  let sent = 0;
  let answered = 0;
  return async () => {
    const number = ++sent;
    const answer = await request();
    if (number < answered) return undefined;
    answered = number;
    return answer;
  };
}
