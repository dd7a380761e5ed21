//! Errors of a service in the event log of Windows, beside the file with everything.

use std::io::{self, Write};
use std::sync::Arc;

use tortie_hcn::native::{EventKind, EventLog};
use tracing::{Level, Metadata};
use tracing_subscriber::fmt::MakeWriter;

/// Writes messages of the level `ERROR` to the event log, if there is one.
#[derive(Clone)]
pub(crate) struct Errors(pub(crate) Option<Arc<EventLog>>);

/// The place of one message; without a log, nowhere.
pub(crate) struct Event(Option<Arc<EventLog>>);

impl<'a> MakeWriter<'a> for Errors {
    type Writer = Event;

    fn make_writer(&'a self) -> Event {
        Event(None)
    }

    fn make_writer_for(&'a self, meta: &Metadata<'_>) -> Event {
        Event(self.0.clone().filter(|_| *meta.level() == Level::ERROR))
    }
}

impl Write for Event {
    /// A message comes in one piece. A full event log must not cost the file its message.
    fn write(&mut self, message: &[u8]) -> io::Result<usize> {
        if let Some(log) = &self.0 {
            let _ = log.report(EventKind::Error, String::from_utf8_lossy(message).trim_end());
        }
        Ok(message.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
