"""vocab_parallel_embedding in CUDA, emulated: the tests of the CPU kernels."""

import pytest

from test_vocab_parallel_embedding import (  # noqa: F401
    test_an_id_of_nobody_hides_what_the_table_holds,
    test_any_ids,
    test_any_shape_of_ids,
    test_both_conventions_of_a_scale_have_torchs_bits,
    test_no_memory_outside_the_table_is_touched,
    test_strided_tables_and_ids,
    test_the_ranks_add_up_to_the_full_lookup,
    test_the_two_conventions_differ,
    test_without_a_scale_every_bit_pattern_passes,
)

pytestmark = pytest.mark.usefixtures("poisoned_memory")
