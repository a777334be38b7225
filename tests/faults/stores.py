"""Files that outlive an interruption."""

from tests.faults.fault import Fault, M

FAULTS = (
    Fault(
        "a run goes on with other code",
        "stores",
        f"{M}/records/run_folder.py",
        'for key in ("source_sha256", "method_sha256"))',
        "for key in ())",
        ("tests/measure/test_run_folder.py",),
    ),
    Fault(
        "a run goes on with other questions",
        "stores",
        f"{M}/records/run_folder.py",
        'before.get("questions_sha256") != code["questions_sha256"]',
        "False",
        ("tests/measure/test_run_folder.py",),
    ),
    Fault(
        "half a line stays in the journal",
        "stores",
        f"{M}/records/run_folder.py",
        "                os.truncate(path, intact_bytes)\n        yield",
        "                pass\n        yield",
        ("tests/measure/test_run_folder.py",),
    ),
    Fault(
        "a file appears before it is whole",
        "stores",
        "specbench/system/files.py",
        'temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")',
        "temporary = path",
        ("tests/measure/test_run_folder.py",),
    ),
)
