//! The parsers of both ends of the socket to a process that implements HNS, for `judges/fuzz`.

use std::io;

use crate::wire::{Answer, read_answer, read_call, write_answer, write_call};
use crate::{Call, Failure};

/// Reads an answer.
///
/// # Errors
/// It is damaged, or not whole.
pub fn answer(mut bytes: &[u8]) -> io::Result<Result<String, Failure>> {
    read_answer(&mut bytes).map(Into::into)
}

/// Writes an answer.
///
/// # Errors
/// It is too large.
pub fn answer_bytes(answer: Result<String, Failure>) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    write_answer(&mut bytes, &Answer::from(answer)).map(|()| bytes)
}

/// Reads a call; `None` if there is none.
///
/// # Errors
/// It is damaged, or not whole.
pub fn call(mut bytes: &[u8]) -> io::Result<Option<Call>> {
    read_call(&mut bytes)
}

/// Writes a call.
///
/// # Errors
/// It is too large.
pub fn call_bytes(call: &Call) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    write_call(&mut bytes, call).map(|()| bytes)
}
