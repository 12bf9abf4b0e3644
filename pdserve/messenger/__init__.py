"""The KV messenger: how a prompt's KV gets from a prefill node's pages into a decode node's. All of it pure.

    facts, hello     who two nodes are, whether they fit, and how they come to trust each other
    link             messages to datagrams and back, in order, exactly once, authenticated
    messages         what is said on a link
    geometry, runs   where KV lies on both sides, and the writes that move it
    imm, slots       what a write's immediate counts for
    events, machine  what both machines have in common
    decode           the receiving side: table in `decode_table`
    prefill          the sending side: table in `prefill_table`

The asyncio shell that performs the machines' effects is in `pdserve.node`.
"""
