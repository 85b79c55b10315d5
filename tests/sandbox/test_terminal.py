"""The tmux mode: keystrokes in, screen out, on both back ends."""

import asyncio

from sandbox.terminal import Terminal


async def shown(terminal: Terminal, text: str) -> str:
    """The screen, once it shows the text."""
    async with asyncio.timeout(20):
        while text not in (screen := await terminal.screen()):
            await asyncio.sleep(0.05)
    return screen


def test_keystrokes_reach_programs_that_read_a_terminal(boxes):
    async def use(box):
        terminal = await Terminal(box).start()
        await terminal.type("python3 -q\n")
        await shown(terminal, ">>>")
        await terminal.type("print('a' + 'b' * 3, \"; $HOME\")\n")
        await shown(terminal, "\nabbb ; $HOME\n")
        await terminal.type("C-d", "stty size;", " sleep 500\n")
        await shown(terminal, "\n40 160\n")
        await terminal.type("C-c", "Up", "Up")
        await shown(terminal, "python3 -q")
        await terminal.type("C-u", f"echo {'x' * 5000}|wc -c\n")
        await shown(terminal, "\n5001\n")
        assert (await box.exec("echo beside", timeout_s=10)).output == "beside\n"

    boxes.run(use)


def test_new_output_is_what_came_since(boxes):
    async def use(box):
        terminal = await Terminal(box).start()
        await terminal.type("PS1='$ '; clear; seq 100; echo one\n")
        await shown(terminal, "\none\n")
        first = await terminal.new_output()
        assert "\n99\n100\none\n" in first and "\n2\n" in first
        await terminal.type("echo two\n")
        await shown(terminal, "\ntwo\n")
        later = await terminal.new_output()
        assert later.endswith("two\n$\n") and "one" not in later

    boxes.run(use)
