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
