from pipeswift import schedules


def test_every_schedule_is_listed_with_what_it_costs_and_needs(pipeswift, monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")
    code, out, _ = pipeswift("schedules")
    assert code == 0
    rows = {line.split()[0]: line for line in out.splitlines() if line.strip()}
    for entry in schedules.entries():
        assert all(text in rows[entry.name] for text in (entry.paper, entry.bubble.text, entry.memory.text))
        assert all(rule.text in rows[entry.name] for rule in entry.rules)
    assert "--chunks" in rows["interleaved-1f1b"]
