//! The protocol between a client and a process that implements HNS: frames of a length (four bytes, big endian) and
//! that many bytes of JSON. A request is a [`Call`], a response an [`Answer`]; a connection carries one call at a
//! time.

use std::io::{self, Read, Write};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::{Call, Failure, HResult};

/// The largest frame in bytes. An endpoint with tens of thousands of addresses in its ACLs stays far below it.
const MAX_FRAME: u32 = 64 << 20;

/// The answer to a call, in the terms of the C API.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub(crate) struct Answer {
    #[serde(rename = "HResult")]
    hresult: HResult,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    output: String,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    error_record: String,
}

impl From<Result<String, Failure>> for Answer {
    fn from(result: Result<String, Failure>) -> Answer {
        match result {
            Ok(output) => Answer { hresult: HResult::S_OK, output, error_record: String::new() },
            Err(Failure { code, record }) => {
                Answer { hresult: code, output: String::new(), error_record: record }
            }
        }
    }
}

impl From<Answer> for Result<String, Failure> {
    fn from(answer: Answer) -> Result<String, Failure> {
        // As clients of the real API do: an error record is a failure, whatever the code (docs/hns.md, Calls).
        if answer.hresult == HResult::S_OK && answer.error_record.is_empty() {
            Ok(answer.output)
        } else {
            Err(Failure { code: answer.hresult, record: answer.error_record })
        }
    }
}

pub(crate) fn write_call(stream: &mut impl Write, call: &Call) -> io::Result<()> {
    write_frame(stream, call)
}

pub(crate) fn read_answer(stream: &mut impl Read) -> io::Result<Answer> {
    read_frame(stream)?.ok_or_else(|| io::ErrorKind::UnexpectedEof.into())
}

/// Reads the next call; `None` if the client has closed the connection.
pub(crate) fn read_call(stream: &mut impl Read) -> io::Result<Option<Call>> {
    read_frame(stream)
}

pub(crate) fn write_answer(stream: &mut impl Write, answer: &Answer) -> io::Result<()> {
    write_frame(stream, answer)
}

fn write_frame(stream: &mut impl Write, document: &impl Serialize) -> io::Result<()> {
    let mut frame = vec![0; 4];
    serde_json::to_writer(&mut frame, document)?;
    let length = u32::try_from(frame.len() - 4).ok().filter(|length| *length <= MAX_FRAME);
    let length = length.ok_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, "document too large"))?;
    frame[..4].copy_from_slice(&length.to_be_bytes());
    stream.write_all(&frame)?;
    stream.flush()
}

fn read_frame<T: DeserializeOwned>(stream: &mut impl Read) -> io::Result<Option<T>> {
    let mut length = [0; 4];
    if stream.read(&mut length[..1])? == 0 {
        return Ok(None);
    }
    stream.read_exact(&mut length[1..])?;
    let length = u32::from_be_bytes(length);
    if length > MAX_FRAME {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "frame too large"));
    }
    let mut frame = Vec::new();
    stream.take(length.into()).read_to_end(&mut frame)?;
    if frame.len() < length as usize {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    serde_json::from_slice(&frame)
        .map(Some)
        .map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
}
