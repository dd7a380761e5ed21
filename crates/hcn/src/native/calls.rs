//! Makes a [`Call`] of the functions: documents to UTF-16 and back, handles that are closed on every path, memory that is
//! freed on every path.

use serde::Deserialize;
use serde_json::{Value, json};

use super::functions::{CloseFunction, Functions, Handle, RawGuid, Text};
use crate::schema::lenient;
use crate::{Call, Failure, Guid, HResult, Kind};

/// The number of the node's own compartment.
const NODE_COMPARTMENT: u32 = 1;

/// Makes calls. Several threads may.
#[derive(Clone, Copy)]
pub(super) struct Calls {
    functions: Functions,
}

/// An open object.
struct Opened {
    handle: Handle,
    close: CloseFunction,
}

impl Drop for Opened {
    fn drop(&mut self) {
        // SAFETY: the handle came from the function that belongs to `close`, and is closed once. Its result says nothing
        // that anybody could act on.
        let _ = unsafe { (self.close)(self.handle) };
    }
}

/// The identifier in an object's document.
#[derive(Deserialize)]
struct Identified {
    #[serde(rename = "ID")]
    id: Guid,
}

/// An answer of `HNSCall`.
#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct OldAnswer {
    #[serde(default)]
    success: bool,
    #[serde(default)]
    error: String,
    #[serde(default)]
    output: Option<Value>,
}

impl Calls {
    pub(super) fn new(functions: Functions) -> Calls {
        Calls { functions }
    }

    pub(super) fn make(&self, call: &Call) -> Result<String, Failure> {
        match call {
            Call::Enumerate { kind, query } => self.enumerate(*kind, query),
            Call::Create { kind, network, id, settings } => self.create(*kind, *network, *id, settings),
            Call::Query { kind, id, query } => self.properties(*kind, &self.open(*kind, *id)?, query),
            Call::Modify { kind, id, settings } => self.modify(*kind, *id, settings),
            Call::Delete { kind, id } => self.delete(*kind, *id),
            Call::AttachToHost { endpoint } => self.attach_to_host(*endpoint),
            Call::Version => self.version(),
            Call::Emulator { name, .. } => {
                Err(Failure::new(HResult::E_NOTIMPL, format!("HNS itself has no call {name}")))
            }
        }
    }

    fn enumerate(&self, kind: Kind, query: &str) -> Result<String, Failure> {
        let function = self.functions.of(kind).enumerate.ok_or_else(|| absent("Enumerate", kind))?;
        let (query, mut ids, mut record) = (utf16(query), std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: the text ends with NUL and lives longer than the call; both results are places for a pointer.
        let code = unsafe { function(query.as_ptr(), &raw mut ids, &raw mut record) };
        let ids = self.take(ids);
        self.outcome(code, record).map(|()| ids)
    }

    /// Creates an object, and returns the identifier that HNS gave it, which may not be the requested one.
    fn create(&self, kind: Kind, network: Guid, id: Guid, settings: &str) -> Result<String, Failure> {
        let close = self.functions.of(kind).close.ok_or_else(|| absent("Close", kind))?;
        let (settings, raw) = (utf16(settings), RawGuid::from(id));
        let (mut handle, mut record) = (std::ptr::null_mut(), std::ptr::null_mut());
        let code = if kind == Kind::Endpoint {
            let function = self.functions.create_endpoint.ok_or_else(|| absent("Create", kind))?;
            let network = self.open(Kind::Network, network)?;
            // SAFETY: the network is open during the call; otherwise as below.
            unsafe {
                function(network.handle, &raw const raw, settings.as_ptr(), &raw mut handle, &raw mut record)
            }
        } else {
            let function = self.functions.of(kind).create.ok_or_else(|| absent("Create", kind))?;
            // SAFETY: the GUID and the text, which ends with NUL, live longer than the call; both results are places for
            // a pointer.
            unsafe { function(&raw const raw, settings.as_ptr(), &raw mut handle, &raw mut record) }
        };
        let created = (!handle.is_null()).then_some(Opened { handle, close });
        self.outcome(code, record)?;
        let created = created.ok_or_else(|| {
            Failure::new(HResult::E_FAIL, format!("HNS created the {kind} and returned no handle"))
        })?;
        let properties = self.properties(kind, &created, "")?;
        let Identified { id } = lenient(&properties).map_err(|error| {
            Failure::new(HResult::E_FAIL, format!("HNS created the {kind}, whose id cannot be read: {error}"))
        })?;
        Ok(format!("\"{id}\""))
    }

    fn open(&self, kind: Kind, id: Guid) -> Result<Opened, Failure> {
        // Without a way to close it, nothing is opened.
        let close = self.functions.of(kind).close.ok_or_else(|| absent("Close", kind))?;
        let function = self.functions.of(kind).open.ok_or_else(|| absent("Open", kind))?;
        let (raw, mut handle, mut record) = (RawGuid::from(id), std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: the GUID lives longer than the call; both results are places for a pointer.
        let code = unsafe { function(&raw const raw, &raw mut handle, &raw mut record) };
        let opened = (!handle.is_null()).then_some(Opened { handle, close });
        self.outcome(code, record)?;
        opened
            .ok_or_else(|| Failure::new(HResult::E_FAIL, format!("HNS opened {kind} {id} without a handle")))
    }

    fn properties(&self, kind: Kind, object: &Opened, query: &str) -> Result<String, Failure> {
        let function = self.functions.of(kind).query.ok_or_else(|| absent("Query", kind))?;
        let (query, mut found, mut record) = (utf16(query), std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: the object is open, and the text, which ends with NUL, lives longer than the call; both results are
        // places for a pointer.
        let code = unsafe { function(object.handle, query.as_ptr(), &raw mut found, &raw mut record) };
        let found = self.take(found);
        self.outcome(code, record).map(|()| found)
    }

    fn modify(&self, kind: Kind, id: Guid, settings: &str) -> Result<String, Failure> {
        let function = self.functions.of(kind).modify.ok_or_else(|| absent("Modify", kind))?;
        let object = self.open(kind, id)?;
        let (settings, mut record) = (utf16(settings), std::ptr::null_mut());
        // SAFETY: the object is open, and the text, which ends with NUL, lives longer than the call; the result is a place
        // for a pointer.
        let code = unsafe { function(object.handle, settings.as_ptr(), &raw mut record) };
        self.outcome(code, record).map(|()| String::new())
    }

    fn delete(&self, kind: Kind, id: Guid) -> Result<String, Failure> {
        let function = self.functions.of(kind).delete.ok_or_else(|| absent("Delete", kind))?;
        let (raw, mut record) = (RawGuid::from(id), std::ptr::null_mut());
        // SAFETY: the GUID lives longer than the call; the result is a place for a pointer.
        let code = unsafe { function(&raw const raw, &raw mut record) };
        self.outcome(code, record).map(|()| String::new())
    }

    /// Only the old interface tells the version.
    fn version(&self) -> Result<String, Failure> {
        match self.old_call(["GET", "/globals/version", ""])? {
            Some(output) => Ok(output.to_string()),
            None => Err(Failure::new(HResult::E_FAIL, "HNS does not tell its version")),
        }
    }

    /// The new interface has no word for the node's compartment (`HostAttach` of hcsshim, `internal/hns/hnsendpoint.go`).
    fn attach_to_host(&self, endpoint: Guid) -> Result<String, Failure> {
        let path = format!("/endpoints/{endpoint}/attach/");
        let request = json!({"SystemType": "Host", "CompartmentId": NODE_COMPARTMENT}).to_string();
        self.old_call(["POST", &path, &request]).map(|_| String::new())
    }

    /// Makes a call of the old interface: method, path and request.
    fn old_call(&self, texts: [&str; 3]) -> Result<Option<Value>, Failure> {
        let function = self.functions.hns_call.ok_or_else(|| {
            Failure::new(
                HResult::E_NOTIMPL,
                "this Windows has no HNSCall: vmcompute.dll is missing or too old",
            )
        })?;
        let [method, path, request] = texts.map(utf16);
        let mut answer = std::ptr::null_mut();
        // SAFETY: the texts end with NUL and live longer than the call; the result is a place for a pointer.
        let code = unsafe { function(method.as_ptr(), path.as_ptr(), request.as_ptr(), &raw mut answer) };
        let answer = self.take(answer);
        self.outcome(code, std::ptr::null_mut())?;
        let answer: OldAnswer = serde_json::from_str(&answer).map_err(|error| {
            Failure::new(HResult::E_FAIL, format!("the answer of HNS cannot be read: {error}"))
        })?;
        if answer.success { Ok(answer.output) } else { Err(Failure::new(HResult::E_FAIL, answer.error)) }
    }

    /// The result of a call. Text in the error record is a failure, also next to a success (hcsshim,
    /// `hcn/hcnerrors.go`).
    fn outcome(&self, code: i32, record: Text) -> Result<(), Failure> {
        let (code, record) = (HResult(code.cast_unsigned()), self.take(record));
        if code.0 < 0x8000_0000 && record.is_empty() { Ok(()) } else { Err(Failure { code, record }) }
    }

    /// Takes a text of the callee, and frees it.
    fn take(&self, text: Text) -> String {
        if text.is_null() {
            return String::new();
        }
        let mut length = 0;
        // SAFETY: the callee's text ends with NUL, and nothing behind the NUL is read.
        while unsafe { *text.add(length) } != 0 {
            length += 1;
        }
        // SAFETY: these units were just read.
        let copy = String::from_utf16_lossy(unsafe { std::slice::from_raw_parts(text, length) });
        // SAFETY: the callee gave the text to this caller, and it is freed once.
        unsafe { (self.functions.free)(text.cast()) };
        copy
    }
}

/// An old build of Windows may lack a function.
fn absent(function: &str, kind: Kind) -> Failure {
    Failure::new(HResult::E_NOTIMPL, format!("this Windows cannot {} a {kind}", function.to_lowercase()))
}

fn utf16(text: &str) -> Vec<u16> {
    text.encode_utf16().chain([0]).collect()
}
