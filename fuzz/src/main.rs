//! libFuzzer's program for the targets of `judges/fuzz`. The variable `TORTIE_FUZZ_TARGET` names the target.
#![no_main]

use std::sync::LazyLock;

use judge_fuzz::{Target, run, target};
use libfuzzer_sys::fuzz_target;
use peak_alloc::PeakAlloc;

#[global_allocator]
static MEMORY: PeakAlloc = PeakAlloc;

static TARGET: LazyLock<&Target> = LazyLock::new(|| {
    let name = std::env::var("TORTIE_FUZZ_TARGET").unwrap_or_default();
    target(&name).unwrap_or_else(|| panic!("TORTIE_FUZZ_TARGET is {name:?}, which is no target"))
});

fuzz_target!(|bytes: &[u8]| {
    if let Err(excess) = run(&TARGET, bytes, &MEMORY) {
        panic!("{excess}");
    }
});
