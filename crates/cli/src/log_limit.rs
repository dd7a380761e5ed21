//! A limit for messages of the log. Some of them can be caused by strangers, as often as they like: by connections without a
//! handshake, for instance, or by invalid annotations.

use std::collections::HashMap;
use std::io::{self, Write};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tracing::callsite::Identifier;
use tracing::{Level, Metadata};
use tracing_subscriber::fmt::MakeWriter;

/// The number of messages from one place in the code that are written within [`WINDOW`]. A node that starts with 110 pods writes
/// fewer about each of them.
const LIMIT: u64 = 200;
const WINDOW: Duration = Duration::from_secs(10);

/// Writes as `inner`, but not more than [`LIMIT`] messages from one place in the code within [`WINDOW`]. Messages for debugging have no
/// limit, because an operator asks for them.
pub(crate) struct Limited<M> {
    inner: M,
    windows: Arc<Mutex<Windows>>,
}

/// The writer of one message.
pub(crate) enum Message<W> {
    Written(W),
    LeftOut,
}

/// The last window of each place in the code.
#[derive(Debug, Default)]
struct Windows(HashMap<Identifier, Window>);

#[derive(Debug)]
struct Window {
    began: Instant,
    messages: u64,
}

/// The treatment of one message.
#[derive(Debug, PartialEq, Eq)]
enum Passage {
    Write,
    /// It is the first one of a window. So many of the last one were left out.
    WriteAfter(u64),
    /// It is left out, and so are those that follow in its window, which the log says.
    Announce,
    LeaveOut,
}

impl<M> Limited<M> {
    pub(crate) fn new(inner: M) -> Self {
        Self { inner, windows: Arc::default() }
    }
}

impl Windows {
    fn judge(&mut self, place: Identifier, now: Instant) -> Passage {
        let window = self.0.entry(place).or_insert(Window { began: now, messages: 0 });
        let before = window.messages;
        if now.saturating_duration_since(window.began) >= WINDOW {
            *window = Window { began: now, messages: 1 };
            return match before.saturating_sub(LIMIT) {
                0 => Passage::Write,
                left_out => Passage::WriteAfter(left_out),
            };
        }
        window.messages += 1;
        match before {
            0..LIMIT => Passage::Write,
            LIMIT => Passage::Announce,
            _ => Passage::LeaveOut,
        }
    }
}

impl<'a, M: MakeWriter<'a>> MakeWriter<'a> for Limited<M> {
    type Writer = Message<M::Writer>;

    fn make_writer(&'a self) -> Self::Writer {
        Message::Written(self.inner.make_writer())
    }

    fn make_writer_for(&'a self, meta: &Metadata<'_>) -> Self::Writer {
        if *meta.level() > Level::INFO {
            return Message::Written(self.inner.make_writer_for(meta));
        }
        let passage = {
            let mut windows = self.windows.lock().unwrap_or_else(PoisonError::into_inner);
            windows.judge(meta.callsite(), Instant::now())
        };
        let (place, seconds) = (meta.target(), WINDOW.as_secs());
        let note = |text: String| {
            // Nobody hears about a log that cannot be written.
            let _ = self.inner.make_writer_for(meta).write_all(text.as_bytes());
        };
        match passage {
            Passage::Write => {}
            Passage::WriteAfter(left_out) => {
                note(format!("{place}: {left_out} messages like the next one were left out\n"));
            }
            Passage::Announce => note(format!(
                "{place}: more than {LIMIT} messages like the last one in {seconds} s; further ones are left out for a moment\n"
            )),
            Passage::LeaveOut => {}
        }
        match passage {
            Passage::Write | Passage::WriteAfter(_) => Message::Written(self.inner.make_writer_for(meta)),
            Passage::Announce | Passage::LeaveOut => Message::LeftOut,
        }
    }
}

impl<W: Write> Write for Message<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Self::Written(writer) => writer.write(bytes),
            Self::LeftOut => Ok(bytes.len()),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match self {
            Self::Written(writer) => writer.flush(),
            Self::LeftOut => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A log in memory.
    #[derive(Clone, Default)]
    struct Lines(Arc<Mutex<Vec<u8>>>);

    impl Write for Lines {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().write(bytes)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_flood_of_one_message_leaves_the_others_readable() {
        let lines = Lines::default();
        let writer = lines.clone();
        let log = tracing_subscriber::fmt()
            .with_max_level(Level::DEBUG)
            .with_writer(Limited::new(move || writer.clone()))
            .finish();
        tracing::subscriber::with_default(log, || {
            for number in 0..5_000 {
                tracing::warn!(number, "a stranger");
                if number % 1_000 == 0 {
                    tracing::error!(number, "a node");
                }
            }
            (0..500).for_each(|number| tracing::debug!(number, "a detail"));
        });
        let text = String::from_utf8(lines.0.lock().unwrap().clone()).unwrap();
        let count = |part: &str| text.lines().filter(|line| line.contains(part)).count();
        assert_eq!(count("a stranger"), usize::try_from(LIMIT).unwrap());
        assert_eq!(count("further ones are left out"), 1);
        assert_eq!((count("a node"), count("a detail")), (5, 500));
    }

    #[test]
    fn the_next_window_says_how_many_were_left_out() {
        let (mut windows, start) = (Windows::default(), Instant::now());
        let place = tracing::info_span!("any").metadata().unwrap().callsite();
        let mut judge = |seconds: u64| windows.judge(place.clone(), start + Duration::from_secs(seconds));
        for _ in 0..LIMIT {
            assert_eq!(judge(0), Passage::Write);
        }
        assert_eq!(judge(9), Passage::Announce);
        assert_eq!(judge(9), Passage::LeaveOut);
        assert_eq!(judge(10), Passage::WriteAfter(2));
        assert_eq!(judge(10), Passage::Write);
        assert_eq!(judge(25), Passage::Write, "nothing was left out");
    }
}
