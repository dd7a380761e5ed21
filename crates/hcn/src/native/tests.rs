//! Calls of functions that count what they hand out and get back.

use std::cell::Cell;
use std::ffi::c_void;

use super::calls::Calls;
use super::functions::{Functions, Handle, ObjectFunctions, RawGuid, Text};
use crate::{Call, Guid, HResult, Kind};

/// The identifier that this HNS gives to everything.
const ID: &str = "0E2A0000-0000-4000-8000-0123456789AB";

thread_local! {
    static OPEN: Cell<i32> = const { Cell::new(0) };
    static TEXTS: Cell<i32> = const { Cell::new(0) };
    static CALLS: Cell<i32> = const { Cell::new(0) };
    /// Which function fails, counted from one.
    static FAILING: Cell<i32> = const { Cell::new(0) };
    /// The code of that failure.
    static CODE: Cell<i32> = const { Cell::new(0) };
}

fn change(counter: &'static std::thread::LocalKey<Cell<i32>>, by: i32) {
    counter.set(counter.get() + by);
}

fn text(content: &str) -> Text {
    change(&TEXTS, 1);
    let units: Box<[u16]> = content.encode_utf16().chain([0]).collect();
    Box::leak(units).as_mut_ptr()
}

unsafe extern "system" fn free(memory: *const c_void) {
    change(&TEXTS, -1);
    let units = memory.cast::<u16>().cast_mut();
    let mut length = 0;
    // SAFETY: it is a text of `text`, which ends with NUL.
    while unsafe { *units.add(length) } != 0 {
        length += 1;
    }
    // SAFETY: the box of `text` had this length, and is freed once.
    drop(unsafe { Box::from_raw(std::ptr::slice_from_raw_parts_mut(units, length + 1)) });
}

/// The result of a function: a failure has a record, and an output all the same.
unsafe fn result(record: *mut Text, give: impl FnOnce()) -> i32 {
    change(&CALLS, 1);
    give();
    if CALLS.get() != FAILING.get() {
        return 0;
    }
    if !record.is_null() {
        // SAFETY: the place is valid.
        unsafe { record.write(text("{\"Error\":\"as the test wants\"}")) };
    }
    CODE.get()
}

fn open_one() -> Handle {
    change(&OPEN, 1);
    std::ptr::without_provenance_mut(7)
}

unsafe extern "system" fn enumerate(_: *const u16, ids: *mut Text, record: *mut Text) -> i32 {
    // SAFETY: the places are valid.
    unsafe { result(record, || ids.write(text(&format!("[\"{ID}\"]")))) }
}

unsafe extern "system" fn create(
    _: *const RawGuid,
    _: *const u16,
    handle: *mut Handle,
    record: *mut Text,
) -> i32 {
    // SAFETY: the places are valid.
    unsafe { result(record, || handle.write(open_one())) }
}

unsafe extern "system" fn create_in(
    network: Handle,
    _: *const RawGuid,
    _: *const u16,
    handle: *mut Handle,
    record: *mut Text,
) -> i32 {
    assert_eq!(network.addr(), 7, "the network is open");
    // SAFETY: the places are valid.
    unsafe { result(record, || handle.write(open_one())) }
}

unsafe extern "system" fn open(_: *const RawGuid, handle: *mut Handle, record: *mut Text) -> i32 {
    // SAFETY: the places are valid.
    unsafe { result(record, || handle.write(open_one())) }
}

unsafe extern "system" fn modify(_: Handle, _: *const u16, record: *mut Text) -> i32 {
    // SAFETY: the place is valid.
    unsafe { result(record, || ()) }
}

unsafe extern "system" fn query(_: Handle, _: *const u16, found: *mut Text, record: *mut Text) -> i32 {
    // SAFETY: the places are valid.
    unsafe { result(record, || found.write(text(&format!("{{\"ID\":\"{ID}\",\"Name\":\"\u{1F408}\"}}")))) }
}

unsafe extern "system" fn delete(_: *const RawGuid, record: *mut Text) -> i32 {
    // SAFETY: the place is valid.
    unsafe { result(record, || ()) }
}

unsafe extern "system" fn close(handle: Handle) -> i32 {
    assert_eq!(handle.addr(), 7);
    change(&OPEN, -1);
    0
}

unsafe extern "system" fn hns_call(_: *const u16, _: *const u16, _: *const u16, answer: *mut Text) -> i32 {
    let version = r#"{"Success":true,"Output":{"Major":15,"Minor":4}}"#;
    // SAFETY: the place is valid.
    unsafe { result(std::ptr::null_mut(), || answer.write(text(version))) }
}

unsafe extern "system" fn old_failure(_: *const u16, _: *const u16, _: *const u16, answer: *mut Text) -> i32 {
    // SAFETY: the place is valid.
    unsafe { answer.write(text(r#"{"Success":false,"Error":"no such path"}"#)) };
    0
}

fn functions() -> Functions {
    let object = ObjectFunctions {
        enumerate: Some(enumerate),
        create: Some(create),
        open: Some(open),
        modify: Some(modify),
        query: Some(query),
        delete: Some(delete),
        close: Some(close),
    };
    Functions {
        network: object,
        endpoint: ObjectFunctions { create: None, ..object },
        namespace: object,
        load_balancer: object,
        sdn_route: object,
        guest_network_service: object,
        create_endpoint: Some(create_in),
        hns_call: Some(hns_call),
        register: None,
        free,
    }
}

fn all_calls() -> Vec<Call> {
    let (id, network) = (Guid::random(), Guid::random());
    let settings = String::from("{}");
    let mut calls = vec![Call::Version, Call::AttachToHost { endpoint: id }];
    for kind in [
        Kind::Network,
        Kind::Endpoint,
        Kind::Namespace,
        Kind::LoadBalancer,
        Kind::SdnRoute,
        Kind::GuestNetworkService,
    ] {
        calls.extend([
            Call::Enumerate { kind, query: String::new() },
            Call::Create { kind, network, id, settings: settings.clone() },
            Call::Query { kind, id, query: String::new() },
            Call::Modify { kind, id, settings: settings.clone() },
            Call::Delete { kind, id },
        ]);
    }
    calls
}

#[test]
fn every_path_closes_what_it_opens_and_frees_what_it_gets() {
    let calls = Calls::new(functions());
    let mut failures = 0;
    for call in all_calls() {
        for code in [HResult::E_FAIL.0.cast_signed(), 0, 1] {
            for failing in 0.. {
                CALLS.set(0);
                FAILING.set(failing);
                CODE.set(code);
                let result = calls.make(&call);
                assert_eq!(
                    (OPEN.get(), TEXTS.get()),
                    (0, 0),
                    "{call:?}, function {failing} fails: {result:?}"
                );
                if failing > CALLS.get() {
                    break;
                }
                // A record next to a success is a failure. The old interface has none.
                let is_old = matches!(call, Call::Version | Call::AttachToHost { .. });
                let fails = failing > 0 && (code < 0 || !is_old);
                assert_eq!(result.is_err(), fails, "{call:?}, function {failing}, code {code}: {result:?}");
                failures += i32::from(fails);
                if let Err(failure) = result {
                    assert_eq!(failure.code.0, code.cast_unsigned());
                    assert!(is_old || failure.record.contains("as the test wants"));
                }
            }
        }
    }
    assert!(failures > 60, "{failures}");
}

#[test]
fn answers_are_those_of_hns() {
    let calls = Calls::new(functions());
    let id: Guid = ID.parse().unwrap();
    let own = Guid::random();
    let create =
        Call::Create { kind: Kind::Network, network: Guid::ZERO, id: own, settings: "{}".to_owned() };
    assert_eq!(calls.make(&create), Ok(format!("\"{id}\"")), "HNS may choose another id");
    let query = Call::Query { kind: Kind::Network, id, query: String::new() };
    assert!(calls.make(&query).unwrap().contains('\u{1F408}'));
    assert_eq!(calls.make(&Call::Version), Ok(r#"{"Major":15,"Minor":4}"#.to_owned()));
    let old = Calls::new(Functions { hns_call: Some(old_failure), ..functions() });
    assert!(old.make(&Call::Version).unwrap_err().record.contains("no such path"));
}

/// Old builds of Windows lack functions.
#[test]
fn a_missing_function_is_an_error_of_its_calls_only() {
    let none = ObjectFunctions {
        enumerate: None,
        create: None,
        open: None,
        modify: None,
        query: None,
        delete: None,
        close: None,
    };
    let without = Functions { load_balancer: none, create_endpoint: None, hns_call: None, ..functions() };
    let calls = Calls::new(without);
    for call in all_calls() {
        let missing = match &call {
            Call::Version | Call::AttachToHost { .. } => true,
            Call::Create { kind, .. } => matches!(kind, Kind::Endpoint | Kind::LoadBalancer),
            Call::Enumerate { kind, .. } | Call::Query { kind, .. } => *kind == Kind::LoadBalancer,
            Call::Modify { kind, .. } | Call::Delete { kind, .. } => *kind == Kind::LoadBalancer,
            Call::Emulator { .. } => false,
        };
        let result = calls.make(&call);
        assert_eq!((OPEN.get(), TEXTS.get()), (0, 0), "{call:?}");
        assert_eq!(result.is_err(), missing, "{call:?}: {result:?}");
        if let Err(failure) = result {
            assert_eq!(failure.code, HResult::E_NOTIMPL);
        }
    }
    // What cannot be closed is not opened.
    let leaky = Functions { network: ObjectFunctions { close: None, ..functions().network }, ..functions() };
    let query = Call::Query { kind: Kind::Network, id: Guid::random(), query: String::new() };
    assert_eq!(Calls::new(leaky).make(&query).unwrap_err().code, HResult::E_NOTIMPL);
    assert_eq!(OPEN.get(), 0);
}
