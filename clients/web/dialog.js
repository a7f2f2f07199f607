// A question in a window of its own: one field, or none.
import {html, useEffect, useRef} from "./html.js";
import {Signal, use} from "./signal.js";

const open = new Signal(null);

/** Asks for a text: {title, label, value}. Answers with it, or null if the question was put away. */
export const askText = (asked) => new Promise((resolve) => open.set({...asked, resolve}));

export function Dialog() {
  const shown = use(open);
  const box = useRef(null);
  const field = useRef(null);
  useEffect(() => {
    if (!shown) return;
    box.current.showModal();
    field.current.select();
  }, [shown]);
  if (!shown) return null;
  const answer = (text) => {
    open.set(null);
    shown.resolve(text);
  };
  return html`<dialog ref=${box} aria-labelledby="dialog-title" onCancel=${() => answer(null)}>
    <form onSubmit=${(event) => (event.preventDefault(), answer(field.current.value))}>
      <h2 id="dialog-title">${shown.title}</h2>
      <label class="field"><span>${shown.label}</span><input ref=${field} value=${shown.value} maxlength="200" dir="auto" /></label>
      <p class="row"><button type="button" onClick=${() => answer(null)}>Cancel</button><button class="main">Save</button></p>
    </form>
  </dialog>`;
}
