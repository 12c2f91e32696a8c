"""Cases that tell whether a backend computes what it should: inputs from a seed, against float64.

    matrix.py                  which cases there are, and which of them a backend can be asked for
    case.py                    a case, the place it runs in, and what comes out of it
    const_max_cases.py         attention_const_max
    prefill_cases.py           attention_kv_parallel_segmented_cte
    projection_cases.py        output_projection_cte
    decode_cases.py            attention_block_tkg
    oracle.py, tolerance.py    what is right, and how far from it is still right

launch/validate.py runs them; nothing here starts a process or prints.
"""
