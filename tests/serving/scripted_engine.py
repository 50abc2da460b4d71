"""An engine without a model, for tests of the front: a token is a number, and prompts say what happens.

The answer to a prompt is its last token, again and again, one each `pace` seconds. Tokens from 200 on are orders
where a 3 is before them. With `SCRIPTED_MEMORY` bytes for rows there are configurations of four layers: an attention
layer takes a byte a token, a converted one 10 for a row; rows are handed over at once.

With `SCRIPTED_STEADY` its steps are those of a GPU's batch: they begin when the last one ends, whatever comes between,
and who finds a row has its first token as a step begins, the next one as it ends.
"""

import json
import os
import select
import signal
import socket
import sys
import time

DIE_AT_ONCE, DIE_LATER, HANG, FAIL, NONSENSE, LONG = 200, 201, 202, 203, 204, 205
ROWS = int(os.environ.get("SCRIPTED_ROWS", "2"))
PACE = float(os.environ.get("SCRIPTED_PACE", "0.005"))
MEMORY = int(os.environ.get("SCRIPTED_MEMORY", "0"))
STEADY = bool(os.environ.get("SCRIPTED_STEADY"))


def row_bytes(converted, tokens):
    return 10 * converted + (4 - converted) * tokens


def described(converted):
    return {
        "name": f"{converted}-of-4",
        "converted": converted,
        "layers": 4,
        "fixed_bytes": row_bytes(converted, 0),
        "token_bytes": row_bytes(converted, 1) - row_bytes(converted, 0),
        "quality": {"increase": converted / 100},
    }


def main():
    connection = socket.socket(fileno=int(sys.argv[1]))
    buffer, rows, stats = b"", {}, {"active": 0, "waiting": 0, "rows": ROWS, "steps": 0, "shrunk": 0, "memory": 1}
    runs_as, switched = {}, []
    due, begun = 0.0, set()

    def say(message):
        connection.sendall(json.dumps(message).encode() + b"\n")

    while True:
        wait = max(0.0, due - time.monotonic()) if STEADY else PACE
        if select.select([connection], [], [], wait if rows else None)[0]:
            data = connection.recv(1 << 20)
            if not data:
                return
            buffer += data
            *lines, buffer = buffer.split(b"\n")
            for line in lines:
                message = json.loads(line)
                if message["op"] == "start":
                    if message["settings"]["max_length"] == 666:
                        say({"op": "fatal", "message": "no such model", "hint": "name another"})
                        return
                    facts = {
                        "max_length": 100,
                        "rows": ROWS,
                        "vocabulary": 259,
                        "path": "scripted",
                        "bytes": {"all": 1},
                    }
                    if MEMORY:
                        facts["configurations"] = [described(converted) for converted in range(5)]
                        stats |= {"total_bytes": MEMORY, "free_bytes": MEMORY}
                        stats |= {"prefill_seconds": 1e-6, "step_seconds": PACE, "queued": []}
                    say({"op": "ready", **facts, "stats": stats})
                elif message["op"] == "stop":
                    return
                elif message["op"] == "cancel":
                    rows.pop(message["id"], None)
                elif message["op"] == "switch":
                    if message["id"] in rows:
                        runs_as[message["id"]] = message["configuration"]
                        tokens = rows[message["id"]][3] + rows[message["id"]][1]
                        switched.append([message["id"], message["configuration"], tokens, 0.01])
                else:
                    first, *_, last = [0, *message["prompt"]][-2:]
                    token = last if first == 3 else min(last, 199)
                    rows[message["id"]] = [token, 0, message["settings"]["max_new_tokens"], len(message["prompt"])]
                    runs_as[message["id"]] = message["configuration"]
        events = []
        if STEADY and time.monotonic() < due:
            continue
        if STEADY and rows:
            # What comes late once is not late for ever.
            due = due + PACE if due + PACE > time.monotonic() else time.monotonic() + PACE
        turn = [name for name in rows if name in begun] if STEADY else list(rows)[:ROWS]
        while turn or (STEADY and (turn := [name for name in list(rows)[:ROWS] if name not in begun])):
            name = turn.pop(0)
            row = rows[name]
            begun.add(name)
            token, count, most, _ = row
            if token == DIE_AT_ONCE or (token == DIE_LATER and count == 3):
                if events:
                    say({"op": "step", "events": events, "stats": stats})
                os.kill(os.getpid(), signal.SIGKILL)
            if token == HANG:
                time.sleep(3600)
            if token == NONSENSE:
                connection.sendall(b"{]\n")
            if token == FAIL:
                say({"op": "failed", "id": name, "kind": "memory", "message": "out of memory: of the test"})
                del rows[name]
                continue
            row[1] += 1
            done = row[1] == most
            shown = "long " * 100_000 if token == LONG else f"{token} "
            events.append([name, [token], shown, "length" if done else None, []])
            if done:
                del rows[name]
        if not rows:
            due = 0.0
        stats["steps"] += 1
        stats["active"] = len(rows)
        if MEMORY:
            taken = sum(row_bytes(int(runs_as[name][0]), row[3] + row[1]) for name, row in rows.items())
            stats["free_bytes"] = MEMORY - taken
        if events or switched:
            say({"op": "step", "events": events, "switched": switched, "stats": stats})
            switched.clear()


if __name__ == "__main__":
    main()
