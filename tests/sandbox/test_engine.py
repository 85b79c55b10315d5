"""Images, engines and their failures, on real engines."""

import asyncio
import gc
import io
import shutil
import subprocess
import tarfile
import time
from pathlib import Path

import docker
import pytest

from sandbox import images, janitor
from sandbox.base import (
    BASE_IMAGE,
    BuildError,
    Environment,
    InfraError,
    Limits,
    Network,
    RefusedError,
    make_backend,
)
from sandbox.docker import DockerBackend
from sandbox.engine import parse_endpoints
from t1jax.errors import UserError

pytestmark = pytest.mark.docker
PROGRAMS = ("bash", "mkdir", "chmod", "rm", "sleep")
TINY = "t1jax/tiny:test"


def in_context(tmp_path: Path, dockerfile: str, **changes: object) -> Environment:
    context = tmp_path / "environment"
    context.mkdir(exist_ok=True)
    (context / "Dockerfile").write_text(dockerfile)
    plain = {"name": "org/built", "context": context, "network": Network.NONE}
    return Environment(**{**plain, **changes})  # type: ignore[arg-type]


def tiny_rootfs() -> bytes:
    """This machine's bash and a few programs with their libraries: an image in a second."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w", dereference=True) as tar:
        files = {str(Path(shutil.which(name) or name).resolve()) for name in PROGRAMS}
        for program in sorted(files):
            tar.add(program, f"bin/{Path(program).name}")
            linked = subprocess.run(["ldd", program], check=True, capture_output=True, text=True)
            for word in linked.stdout.split():
                if word.startswith("/") and word.lstrip("/") not in tar.getnames():
                    tar.add(word, word)
    return content.getvalue()


def use_backend(endpoints: str, use):
    async def run():
        backend = DockerBackend(endpoints=endpoints, build_network="none")
        try:
            return await use(backend)
        finally:
            await backend.close()

    return asyncio.run(run())


def test_an_image_is_built_once_per_content(engine, tmp_path):
    steps = "RUN cat /proc/sys/kernel/random/uuid > /id\nWORKDIR /w\nENV A=image\n"
    environment = in_context(tmp_path, f"FROM {BASE_IMAGE}\n{steps}# {tmp_path}\n")

    async def identity(backend):
        async with backend.sandbox(environment) as box:
            return (await box.exec("cat /id; pwd; echo $A", timeout_s=20)).output

    async def use(backend):
        other = DockerBackend(endpoints=engine, build_network="none")
        first = await asyncio.gather(identity(backend), identity(other))
        await other.close()
        (environment.context / "more").write_text("content")  # type: ignore[operator]
        return first, images.context_hash(environment.context)  # type: ignore[arg-type]

    before = images.context_hash(environment.context)  # type: ignore[arg-type]
    (one, two), after = use_backend(engine, use)
    assert one == two and one.endswith("\n/w\nimage\n")
    assert before != after


def test_a_dockerfile_that_fails_shows_why(engine, tmp_path):
    environment = in_context(tmp_path, f"FROM {BASE_IMAGE}\nRUN echo the reason; exit 3\n")
    with pytest.raises(BuildError, match=r"(?s)org/built: .*returned a non-zero code: 3.*reason"):
        use_backend(engine, lambda backend: backend.prepare(environment))
    slow = in_context(tmp_path, f"FROM {BASE_IMAGE}\nRUN echo a; sleep 9\n", build_timeout_s=0.1)
    with pytest.raises(BuildError, match=r"took longer than 0\.1 s"):
        use_backend(engine, lambda backend: backend.prepare(slow))


def test_an_image_that_cannot_be_pulled_is_named_after_retries(engine, monkeypatch):
    monkeypatch.setattr(images, "PULL_WAIT_S", 0.01)
    environment = Environment(name="org/pulled", image="localhost:1/no/such:image")
    with pytest.raises(InfraError, match=r"cannot pull localhost:1/no/such:image to unix:"):
        use_backend(engine, lambda backend: backend.prepare(environment))


def test_an_image_without_bash_is_refused(engine, tmp_path):
    environment = in_context(tmp_path, "FROM scratch\nCOPY Dockerfile /\n")

    async def use(backend):
        async with backend.sandbox(environment):
            pass

    with pytest.raises(RefusedError, match="has no bash"):
        use_backend(engine, use)


def test_commands_run_as_the_user_of_the_image_or_as_another(engine, tmp_path):
    steps = "RUN useradd --create-home agent\nUSER agent\n"
    environment = in_context(tmp_path, f"FROM {BASE_IMAGE}\n{steps}")

    async def use(backend):
        async with backend.sandbox(environment) as box:
            who = "id -un; echo $HOME; kill -9 1 2>&1; touch /etc/x 2>&1; true"
            agent = await box.exec(who, timeout_s=20)
            root = await box.exec("id -un; touch /etc/x && echo can", timeout_s=20,
                                  session="verifier", user="root")  # fmt: skip
            await box.exec("sleep 500 &", timeout_s=20)
            await box.end_processes()
            return agent.output, root.output

    agent, root = use_backend(engine, use)
    assert agent.startswith("agent\n/home/agent\n") and agent.count("denied\n") == 1
    assert "not permitted" in agent
    assert root == "root\ncan\n"


def test_a_full_engine_makes_the_next_sandbox_wait(engine):
    environment = Environment(name="t", image=BASE_IMAGE, network=Network.NONE)

    async def use(backend):
        first = backend.sandbox(environment)
        await first.start()
        second = backend.sandbox(environment)
        waiting = asyncio.create_task(second.start())
        await asyncio.sleep(0.7)
        assert not waiting.done()
        await first.stop()
        await waiting
        await second.stop()

    use_backend(f"{engine}=1", use)


def test_a_start_that_is_cancelled_leaves_no_container(engine):
    environment = Environment(name="t", image=BASE_IMAGE, network=Network.NONE)

    async def use(backend):
        for delay_s in (0.0, 0.01, 0.03, 0.06, 0.1):
            box = backend.sandbox(environment)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(delay_s):
                    async with box:
                        await asyncio.sleep(9)
        return backend.labels["t1jax.run"]

    run = use_backend(engine, use)
    client = docker.DockerClient(base_url=engine)
    assert client.containers.list(all=True, filters={"label": f"t1jax.run={run}"}) == []
    client.close()


def test_endpoints_are_read_with_their_capacity():
    one, two = parse_endpoints("tcp://a:2376=8, unix:///run/x.sock")
    assert (one.url, one.capacity, two.url) == ("tcp://a:2376", 8, "unix:///run/x.sock")
    for wrong in ("ssh://host", "tcp://a=many", "tcp://a=0"):
        with pytest.raises(UserError, match=r"expected|capacity"):
            parse_endpoints(wrong)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("moment", ["build", "start", "exec", "upload"])
def test_an_engine_that_dies_is_an_infra_error_and_nothing_leaks(own_engine, tmp_path, moment):
    client = docker.DockerClient(base_url=own_engine.url)
    client.api.import_image_from_data(tiny_rootfs(), repository=TINY.split(":")[0], tag="test")
    slow = f"FROM {TINY}\nRUN [\"/bin/sleep\", \"60\"]\n# {tmp_path}\n"
    environment = Environment(
        name="t", image=TINY, network=Network.NONE, limits=Limits(memory_mb=128)
    )

    async def use(backend):
        if moment == "build":
            await backend.prepare(in_context(tmp_path, slow))
            return
        box = backend.sandbox(environment)
        if moment == "start":
            own_engine.kill()
            await box.start()
        await box.start()
        if moment == "upload":
            own_engine.kill()
            await box.upload(Path(__file__), "/file")
        await box.exec("sleep 500", timeout_s=100)

    async def run():
        backend = DockerBackend(endpoints=own_engine.url, build_network="none")
        local = make_backend("local")
        beside = Environment(name="beside", local=True, network=Network.NONE)
        async with local.sandbox(beside) as other:
            begin = time.monotonic()
            using = asyncio.create_task(use(backend))
            await asyncio.sleep(1.5)
            if moment in ("build", "exec"):
                await asyncio.to_thread(own_engine.kill)
            with pytest.raises(InfraError):
                await using
            assert time.monotonic() - begin < 20
            assert (await other.exec("echo goes on", timeout_s=10)).output == "goes on\n"
        await backend.close()

    asyncio.run(run())
    client.close()
    gc.collect()  # the SDK leaves a socket open when its first request fails
    own_engine.start()
    # This process, which made them, lives: a janitor is told the run. A build's own container has
    # no label; the engine left it stopped.
    client = docker.DockerClient(base_url=own_engine.url)
    for container in client.containers.list(all=True, filters={"label": "t1jax.run"}):
        run_id = container.labels["t1jax.run"]
        asyncio.run(janitor.clean(endpoints=own_engine.url, run_id=run_id))
    assert client.containers.list(all=moment != "build") == []
    client.close()
