//! The protocol between plugin and agent: on a local connection ([`local`]), each message is a 32-bit big-endian length
//! and JSON.

use std::io;
use std::path::Path;
use std::time::Duration;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::{Failure, Success, local};

/// The maximum size of a message.
pub const MAX_MESSAGE_BYTES: usize = 1 << 20;

/// The agent's answer, with a result if the command has one.
pub type Answer = Result<Option<Success>, Failure>;

/// The encoding of [`Answer`].
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum AnswerMessage {
    Done(Option<Success>),
    Failed(Failure),
}

/// Encodes an answer as a message.
///
/// # Errors
/// It is too large.
pub fn encode_answer(answer: Answer) -> io::Result<Vec<u8>> {
    encode(&match answer {
        Ok(success) => AnswerMessage::Done(success),
        Err(failure) => AnswerMessage::Failed(failure),
    })
}

/// Encodes a message with its length.
///
/// # Errors
/// It is too large.
pub fn encode(message: &impl Serialize) -> io::Result<Vec<u8>> {
    let json = serde_json::to_vec(message)?;
    let length = u32::try_from(json.len()).ok().filter(|_| json.len() <= MAX_MESSAGE_BYTES);
    let length =
        length.ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "the message is too large"))?;
    let mut bytes = length.to_be_bytes().to_vec();
    bytes.extend(json);
    Ok(bytes)
}

/// The length of the body that follows these four bytes.
///
/// # Errors
/// It is too large.
pub fn body_length(header: [u8; 4]) -> io::Result<usize> {
    let length = usize::try_from(u32::from_be_bytes(header)).unwrap_or(usize::MAX);
    if length > MAX_MESSAGE_BYTES {
        return Err(io::Error::new(
            io::ErrorKind::InvalidData,
            format!("a message of {length} bytes is too large"),
        ));
    }
    Ok(length)
}

/// Sends a request to the agent at an address and waits for its answer.
///
/// # Errors
/// The connection fails, or the answer is invalid.
pub fn ask(address: &Path, invocation: &crate::Invocation, patience: Duration) -> io::Result<Answer> {
    let answer = local::exchange(address, encode(invocation)?, patience, is_complete)?;
    read_answer(&answer)
}

/// Reads an answer.
pub(crate) fn read_answer(message: &[u8]) -> io::Result<Answer> {
    Ok(match decode::<AnswerMessage>(message)? {
        AnswerMessage::Done(success) => Ok(success),
        AnswerMessage::Failed(failure) => Err(failure),
    })
}

/// Whether this is a whole message, or can never become one.
pub(crate) fn is_complete(message: &[u8]) -> bool {
    match message.split_first_chunk() {
        Some((header, body)) => body_length(*header).map_or(true, |length| body.len() >= length),
        None => false,
    }
}

fn decode<T: DeserializeOwned>(message: &[u8]) -> io::Result<T> {
    let incomplete = || io::Error::from(io::ErrorKind::UnexpectedEof);
    let (header, body) = message.split_first_chunk().ok_or_else(incomplete)?;
    let body = body.get(..body_length(*header)?).ok_or_else(incomplete)?;
    Ok(serde_json::from_slice(body)?)
}
