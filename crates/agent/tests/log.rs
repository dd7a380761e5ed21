//! What an agent logs, and how often.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used)]

mod common;

use std::io;
use std::sync::{Arc, Mutex};

use common::{Bed, condition, until};
use serde_json::json;
use tortie_api::{Key, Kind};
use tortie_dataplane::{Reason, Report};

#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl io::Write for Log {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A condition that lasts for weeks must not hide new ones in the log.
#[tokio::test(flavor = "multi_thread")]
async fn a_standing_condition_is_logged_once() {
    let log = Log::default();
    let writer = log.clone();
    tracing_subscriber::fmt().with_writer(move || writer.clone()).with_ansi(false).init();
    let bed = Bed::new().await;
    bed.os.lock().report = Report { node: vec![condition(Reason::RouteTaken)], ..Report::default() };
    let count = |what: &str| String::from_utf8_lossy(&log.0.lock().unwrap()).matches(what).count();
    for number in 0..10 {
        let given = bed.os.lock().batches.len();
        let name = format!("ns{number}");
        let key = Key::global(Kind::Namespace, &name);
        bed.store.create(&key, json!({"metadata": {"name": name}})).await.unwrap();
        until("it is made true", || async { bed.os.lock().batches.len() > given }).await;
    }
    until("it is logged", || async { count("the test says RouteTaken") > 0 }).await;
    assert_eq!(count("the test says RouteTaken"), 1);

    bed.os.lock().report = Report::default();
    let key = Key::global(Kind::Namespace, "last");
    bed.store.create(&key, json!({"metadata": {"name": "last"}})).await.unwrap();
    until("the end is logged", || async { count("resolved: the test says RouteTaken") == 1 }).await;
}
