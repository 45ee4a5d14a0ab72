// Which claims are shown: those with a chosen verdict and with the words looked for.
const claims = [...document.querySelectorAll(".claim")], buttons = [...document.querySelectorAll(".counts button")];
const filter = document.querySelector(".filter"), input = filter.querySelector("input"), output = filter.querySelector("output");
let chosen = "";
function show() {
  const words = input.value.trim().toLowerCase();
  let shown = 0;
  for (const claim of claims) {
    claim.hidden = (chosen && !claim.dataset.status.split("|").includes(chosen)) || (words && !claim.textContent.toLowerCase().includes(words));
    shown += !claim.hidden;
  }
  for (const button of buttons) button.setAttribute("aria-pressed", button.dataset.status === chosen);
  output.textContent = shown === claims.length ? "" : `${shown} of ${claims.length}${chosen ? `, ${chosen}` : ""}`;
}
for (const button of buttons) button.addEventListener("click", () => {
  chosen = chosen === button.dataset.status ? "" : button.dataset.status;
  show();
  if (chosen) document.getElementById("claims").scrollIntoView();
});
input.addEventListener("input", show);
// A link to a claim that is hidden shows all again.
addEventListener("hashchange", () => {
  const claim = document.getElementById(location.hash.slice(1));
  if (claim && claim.hidden) { chosen = ""; input.value = ""; show(); claim.scrollIntoView(); }
});
filter.hidden = false;
