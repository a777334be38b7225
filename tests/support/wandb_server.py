"""As much of the service after Weights & Biases as its client needs here: runs, files and artifacts, in memory.

Whoever talks to it is the real client (`wandb sync`, `wandb.init`, `wandb.Api`): so what is tested is what the client
reads from a log, sends, gets back and checks. The shape of the answers is that of the client's own queries.
"""

from __future__ import annotations

import gzip
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

KEY = "0" * 40
PROJECT = {"id": "p", "internalId": "1", "name": "specbench", "entity": {"id": "e", "name": "me"}}
LAST_PAGE = {"endCursor": None, "hasNextPage": False}


class Service:
    """What clients have sent: variables of `UpsertBucket` by run, lines of its history, files, and artifacts."""

    def __init__(self, url: str):
        self.url = url
        self.runs: dict[str, dict] = {}
        self.history: dict[str, list[dict]] = {}
        self.files: dict[str, bytes] = {}
        self.artifacts: dict[str, dict] = {}  # by client's id

    # -- what the client asks, by the name of its query

    def Viewer(self, given: dict) -> dict:
        nobody = {"apiKeys": None, "teams": {"edges": []}, "flags": "{}", "email": None}
        return {
            "viewer": {"id": "u", "name": "me", "username": "me", "entity": "me", "admin": False, **nobody}
        }

    GetViewer = GetDefaultEntity = Viewer

    def ServerFeaturesQuery(self, given: dict) -> dict:
        return {"serverInfo": {"features": []}}

    def RunResumeStatus(self, given: dict) -> dict:
        known = given["name"] in self.runs
        return {"model": PROJECT | {"bucket": self._bucket(given["name"]) if known else None}}

    def UpsertBucket(self, given: dict) -> dict:
        inserted = given["name"] not in self.runs
        sent = {key: value for key, value in given.items() if value is not None}
        self.runs[given["name"]] = self.runs.get(given["name"], {}) | sent
        return {"upsertBucket": {"bucket": self._bucket(given["name"]), "inserted": inserted}}

    def CreateRunFiles(self, given: dict) -> dict:
        files = [self._upload(name, f"{given['run']}/{name}") for name in given["files"]]
        return {"createRunFiles": {"runID": given["run"], "uploadHeaders": [], "files": files}}

    def ArtifactType(self, given: dict) -> dict:
        return {"project": {"artifact": None}}  # no other artifact has that name

    def CreateArtifact(self, given: dict) -> dict:
        asked = given["input"]
        kept = self._version(asked["artifactCollectionName"], asked["digest"])
        if kept is None:
            kept = self.artifacts[asked["clientID"]] = asked | {"state": "PENDING", "names": []}
        artifact = {
            "id": kept["clientID"],
            "state": kept["state"],
            "artifactSequence": {"latestArtifact": None},
        }
        return {"createArtifact": {"artifact": artifact}}

    def CreateArtifactManifest(self, given: dict) -> dict:
        file = self._upload(given["name"], f"{given['artifactID']}.manifest") | {"id": "f"}
        manifest = {"id": given["artifactID"], "file": file}
        return {"createArtifactManifest": {"artifactManifest": manifest}}

    def CreateArtifactFiles(self, given: dict) -> dict:
        edges = []
        for file in given["input"]["artifactFiles"]:
            number, name = file["artifactID"], file["name"]
            self.artifacts[number]["names"].append(name)
            place = {"storagePath": name, "uploadMultipartUrls": None, "artifact": {"id": number}}
            edges.append({"node": self._upload(name, f"{number}/{name}") | place})
        return {"createArtifactFiles": {"files": {"edges": edges}}}

    def CommitArtifact(self, given: dict) -> dict:
        artifact = self.artifacts[given["artifactID"]]
        artifact["state"] = "COMMITTED"
        return {"commitArtifact": {"artifact": {"id": given["artifactID"], "digest": artifact["digest"]}}}

    def ArtifactByID(self, given: dict) -> dict:
        return {"artifact": self._artifact(self.artifacts[given["id"]])}

    def Runs(self, given: dict) -> dict:
        if given["project"] != PROJECT["name"]:
            return {"project": None}
        group = json.loads(given["filters"])["group"]
        runs = [run for run in self.runs.values() if run.get("groupName") == group]
        edges = [{"node": self._bucket(run["name"]), "cursor": run["name"]} for run in runs]
        found = {"edges": edges, "pageInfo": LAST_PAGE}
        return {"project": PROJECT | {"runCount": len(runs), "readOnly": False, "runs": found}}

    def RunOutputArtifacts(self, given: dict) -> dict:
        nodes = [self._artifact(a) for a in self.artifacts.values() if a["runName"] == given["run"]]
        found = {"totalCount": len(nodes), "pageInfo": LAST_PAGE, "edges": [{"node": n} for n in nodes]}
        return {"project": {"run": {"artifacts": found}}}

    def FetchArtifactManifest(self, given: dict) -> dict:
        url = f"{self.url}/storage/{given['id']}.manifest"
        return {"artifact": {"currentManifest": {"file": {"directUrl": url}}}}

    def GetArtifactMembershipFileUrls(self, given: dict) -> dict:
        artifact = self._version(given["collection"])
        urls = {name: f"{self.url}/storage/{artifact['clientID']}/{name}" for name in artifact["names"]}
        edges = [{"node": {"__typename": "File", "name": n, "directUrl": url}} for n, url in urls.items()]
        files = {"pageInfo": LAST_PAGE, "edges": edges}
        collection = {"__typename": "ArtifactSequence", "artifactMembership": {"files": files}}
        return {"project": {"artifactCollection": collection}}

    # -- parts of the answers

    def _version(self, collection: str, digest: str | None = None) -> dict | None:
        """The artifact of that name and content (None: any): the same content twice is one version."""
        named = [a for a in self.artifacts.values() if a["artifactCollectionName"] == collection]
        return next((a for a in named if digest in (None, a["digest"])), None)

    def _bucket(self, name: str) -> dict:
        run = self.runs[name]
        lines = self.history.get(name, [])
        tail = json.dumps([json.dumps(line) for line in lines[-1:]])
        return {
            "id": name,
            "name": name,
            "displayName": run["displayName"],
            "project": PROJECT,
            "projectId": "1",
            "config": run["config"],
            "group": run.get("groupName"),
            "jobType": run.get("jobType"),
            "state": "finished",
            "summaryMetrics": "{}",
            "historyLineCount": len(lines),
            "historyTail": tail,
            "eventsTail": "[]",
            "eventsLineCount": 0,
            "logLineCount": 0,
            "tags": [],
            "wandbConfig": '{"t": 1}',
        }

    def _artifact(self, artifact: dict) -> dict:
        collection = {
            "__typename": "ArtifactSequence",
            "name": artifact["artifactCollectionName"],
            "project": PROJECT,
        }
        return {
            "__typename": "Artifact",
            "id": artifact["clientID"],
            "artifactSequence": collection,
            "versionIndex": 0,
            "artifactType": {"name": artifact["artifactTypeName"]},
            "description": None,
            "metadata": None,
            "ttlDurationSeconds": 0,
            "ttlIsInherited": False,
            "tags": [],
            "historyStep": None,
            "state": artifact["state"],
            "size": 0,
            "digest": artifact["digest"],
            "digestAlgorithm": "MANIFEST_MD5",
            "commitHash": "0",
            "fileCount": len(artifact["names"]),
            "createdAt": "2026-01-01T00:00:00",
            "updatedAt": None,
            "aliases": [],
        }

    def _upload(self, name: str, path: str) -> dict:
        return {"name": name, "uploadUrl": f"{self.url}/storage/{path}", "uploadHeaders": []}


class Handler(BaseHTTPRequestHandler):
    service: Service

    def do_POST(self):
        body = self._body()
        if self.path == "/graphql":
            asked = json.loads(body)
            operation = re.search(r"(?:query|mutation)\s+(\w+)", asked["query"])[1]
            known = getattr(self.service, operation, None)
            if known is None:
                self._send(f"no {operation} here".encode(), 404)
            else:
                self._send(json.dumps({"data": known(asked.get("variables") or {})}).encode())
        elif self.path.endswith("/file_stream"):
            sent = json.loads(body).get("files", {}).get("wandb-history.jsonl", {})
            lines = self.service.history.setdefault(self.path.split("/")[-2], [])
            lines[sent.get("offset", len(lines)) :] = [json.loads(line) for line in sent.get("content", [])]
            self._send(b"{}")
        else:
            self._send(b"", 404)

    def do_PUT(self):
        self.service.files[self.path.removeprefix("/storage/")] = self._body()
        self._send(b"")

    def do_GET(self):
        self._send(self.service.files[self.path.removeprefix("/storage/")])

    def _body(self) -> bytes:
        content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        return gzip.decompress(content) if self.headers.get("Content-Encoding") == "gzip" else content

    def _send(self, content: bytes, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_) -> None:
        pass


@contextmanager
def serving() -> Iterator[Service]:
    """The service on a port of its own, while the context lasts."""
    handler = type("Handler", (Handler,), {})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        handler.service = Service(f"http://127.0.0.1:{server.server_port}")
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield handler.service
        server.shutdown()
        thread.join()
