// Requests to the studio's server. Addresses are relative to the page, so they carry its token.

export class StudioError extends Error {}

/** Post JSON and return the response; throw a StudioError with the server's message. */
export async function post(path, fields, signal) {
  let response;
  try {
    response = await fetch(path, {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify(fields),
      signal,
    });
  } catch (problem) {
    if (problem.name === "AbortError") throw problem;
    throw new StudioError("the studio does not answer: if it has ended, start it again, and open the address that it prints");
  }
  if (!response.ok) throw new StudioError(await messageOf(response));
  return response;
}

async function messageOf(response) {
  const text = await response.text();
  try {
    return JSON.parse(text).error;
  } catch {
    return text || `the studio answered with status ${response.status}`;
  }
}
