"""The kernel's tables say what `ir.needs` and `ir.MAKES` say."""

from dataclasses import replace

import numpy as np

from pipeswift.cost import Costs
from pipeswift.ir import MAKES, Action, Op, Product, needs
from pipeswift.schedules import build
from pipeswift.simulate.tables import NONE, PRODUCTS, dependencies, links, product_of
from tests.simulate.written import written

STAGES, MICROBATCHES = 3, 5


def test_needs_are_those_of_the_vocabulary():
    table = dependencies(STAGES, MICROBATCHES)
    position = np.arange(PRODUCTS * STAGES * MICROBATCHES).reshape(PRODUCTS, STAGES, MICROBATCHES)
    for op in Op:
        for stage in range(STAGES):
            for microbatch in range(MICROBATCHES):
                mine = table.needs[op, stage]
                found = {int(base) + microbatch for base in mine[mine != NONE]}
                expected = needs(Action(stage, op, microbatch), STAGES)
                assert found == {position[product, source, microbatch] for product, source in expected}


def test_makes_what_someone_needs():
    table = dependencies(STAGES, MICROBATCHES)
    assert [product_of(op) for op in Op] == [Product.OUTPUT, Product.GRADIENT, None, Product.GRADIENT]
    assert all(product_of(op) in (*MAKES[op], None) for op in Op)
    assert table.makes[Op.F].tolist() == [0, 5, 10]
    assert table.makes[Op.I].tolist() == table.makes[Op.B].tolist() == [15, 20, 25]
    assert (table.makes[Op.W] == NONE).all()


def test_links_join_neighbouring_stages_of_a_route():
    schedule = written("0F0 0B0 1F1 1B1", "1F0 1B0 0F1 0B1", routes=((0, 1), (1, 0)))
    table = links(schedule, Costs.uniform(2, comm=0.5))
    assert table.receiver[:, Op.F].tolist() == [[1, NONE], [0, NONE]]
    assert table.receiver[:, Op.B].tolist() == [[NONE, 0], [NONE, 1]]
    assert table.latency[:, Op.F].tolist() == [[0.5, 0.0], [0.5, 0.0]]
    assert (table.channel == NONE).all()


def test_serial_channels_are_one_per_ordered_pair_of_ranks():
    schedule = build("interleaved-1f1b", 2, 2, chunks=2)
    table = links(schedule, replace(Costs.uniform(4), serial_channels=True))
    forward, backward = table.channel[0, Op.F], table.channel[0, Op.B]
    assert forward[0] == forward[2] == backward[2]  # rank 0 to rank 1
    assert forward[1] == backward[1] == backward[3] != forward[0]  # rank 1 to rank 0
    assert forward[3] == backward[0] == NONE
