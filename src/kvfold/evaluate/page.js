for (const command of document.querySelectorAll(".command")) {
  const [line, button] = command.children;
  button.hidden = false;
  button.addEventListener("click", () => {
    getSelection().selectAllChildren(line);
    button.textContent = document.execCommand("copy") ? "Copied" : "Selected";
    setTimeout(() => { button.textContent = "Copy"; }, 2000);
  });
}
