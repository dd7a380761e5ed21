//! Serves calls over a socket.

use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
#[cfg(unix)]
use std::os::unix::net::UnixListener;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use tracing::{debug, warn};

use crate::Hcn;
use crate::wire::{read_call, write_answer};

/// How long to wait after a failed accept: descriptors or memory may be short until a client disconnects.
const PAUSE: Duration = Duration::from_millis(100);

/// Serves `hcn` to every client until the listener fails. Each connection has its own thread, so that a long call
/// delays nobody else.
#[cfg(unix)]
pub fn serve_unix(listener: &UnixListener, hcn: &Arc<dyn Hcn>) -> io::Result<()> {
    serve(|| listener.accept().map(|(stream, _)| stream), hcn)
}

/// As [`serve_unix`], over TCP: for clients under Wine, which has no Unix sockets. Bind it to the loopback address
/// only.
pub fn serve_tcp(listener: &TcpListener, hcn: &Arc<dyn Hcn>) -> io::Result<()> {
    let accept = || {
        let (stream, _) = listener.accept()?;
        // Without it, answers are only slower.
        if let Err(error) = stream.set_nodelay(true) {
            debug!(%error, "an HCN client's socket keeps its delay");
        }
        Ok::<TcpStream, io::Error>(stream)
    };
    serve(accept, hcn)
}

/// An error of one client does not affect the others.
fn serve<S: Read + Write + Send + 'static>(
    mut accept: impl FnMut() -> io::Result<S>,
    hcn: &Arc<dyn Hcn>,
) -> io::Result<()> {
    loop {
        match accept().and_then(|stream| spawn_connection(stream, hcn)) {
            Ok(()) => {}
            // The socket does not listen and never will.
            Err(error) if error.kind() == io::ErrorKind::InvalidInput => return Err(error),
            Err(error) => {
                warn!(%error, "cannot serve an HCN client; others are not affected");
                // A client that gave up is no shortage of resources.
                if error.kind() != io::ErrorKind::ConnectionAborted {
                    thread::sleep(PAUSE);
                }
            }
        }
    }
}

/// Runs [`serve_unix`] in a separate thread.
#[cfg(unix)]
pub fn spawn_unix(listener: UnixListener, hcn: Arc<dyn Hcn>) -> io::Result<JoinHandle<io::Result<()>>> {
    thread::Builder::new().name("hcn-server".into()).spawn(move || serve_unix(&listener, &hcn))
}

/// Runs [`serve_tcp`] in a separate thread.
pub fn spawn_tcp(listener: TcpListener, hcn: Arc<dyn Hcn>) -> io::Result<JoinHandle<io::Result<()>>> {
    thread::Builder::new().name("hcn-server".into()).spawn(move || serve_tcp(&listener, &hcn))
}

fn spawn_connection<S: Read + Write + Send + 'static>(mut stream: S, hcn: &Arc<dyn Hcn>) -> io::Result<()> {
    let hcn = Arc::clone(hcn);
    let answer_all = move || {
        if let Err(error) = answer_calls(&mut stream, &*hcn) {
            warn!(%error, "an HCN client's connection broke off");
        }
    };
    thread::Builder::new().name("hcn-client".into()).spawn(answer_all).map(drop)
}

fn answer_calls(stream: &mut (impl Read + Write), hcn: &dyn Hcn) -> io::Result<()> {
    while let Some(call) = read_call(stream)? {
        let result = hcn.call(&call);
        debug!(?call, ?result, "call");
        write_answer(stream, &result.into())?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;
    use std::sync::mpsc::{Receiver, Sender, channel};
    use std::sync::{Condvar, Mutex};
    use std::time::Instant;

    use super::*;
    use crate::{Address, Call, Class, Failure, Guid, HResult, HcnExt, Kind, RemoteHcn, Version};

    /// Answers the version, rejects the rest, and holds a delete until it is released.
    struct Answers {
        held: Mutex<bool>,
        let_go: Condvar,
        seen: Mutex<Sender<String>>,
    }

    impl Answers {
        fn new() -> (Arc<Answers>, Receiver<String>) {
            let (seen, calls) = channel();
            let answers = Answers { held: Mutex::new(true), let_go: Condvar::new(), seen: Mutex::new(seen) };
            (Arc::new(answers), calls)
        }
    }

    impl Hcn for Answers {
        fn call(&self, call: &Call) -> Result<String, Failure> {
            let _ = self.seen.lock().unwrap().send(call.name().to_owned());
            match call {
                Call::Version => Ok(r#"{"Major":15,"Minor":4}"#.into()),
                Call::Delete { .. } => {
                    let held = self.held.lock().unwrap();
                    drop(self.let_go.wait_while(held, |held| *held).unwrap());
                    Ok(String::new())
                }
                _ => Err(Failure::new(HResult::HCN_E_NETWORK_NOT_FOUND, "no networks \u{1F408} here")),
            }
        }
    }

    const DEADLINE: Duration = Duration::from_secs(20);

    #[test]
    fn calls_and_errors_pass_over_both_kinds_of_socket() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("hns.sock");
        let (answers, _calls) = Answers::new();
        spawn_unix(UnixListener::bind(&path).unwrap(), answers.clone()).unwrap();
        let tcp = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = Address::Tcp(tcp.local_addr().unwrap());
        spawn_tcp(tcp, answers).unwrap();
        for address in [Address::Unix(path), address] {
            let hcn = RemoteHcn::new(address, DEADLINE);
            assert_eq!(hcn.version(), Ok(Version::new(15, 4)));
            let error = hcn.network(Guid::random()).unwrap_err();
            assert!(error.is_not_found());
            assert!(error.to_string().contains("no networks \u{1F408} here"), "{error}");
            assert_eq!(hcn.version(), Ok(Version::new(15, 4)));
        }
    }

    #[test]
    fn a_call_without_answer_ends_at_its_deadline_and_blocks_no_other() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("hns.sock");
        let (answers, calls) = Answers::new();
        spawn_unix(UnixListener::bind(&path).unwrap(), answers.clone()).unwrap();
        let hcn = Arc::new(RemoteHcn::new(Address::Unix(path.clone()), DEADLINE));
        let waiting = {
            let hcn = hcn.clone();
            thread::spawn(move || hcn.delete_network(Guid::random()))
        };
        assert_eq!(calls.recv().unwrap(), "delete");
        assert_eq!(hcn.version(), Ok(Version::new(15, 4)), "while another call is under way");

        let hasty = RemoteHcn::new(Address::Unix(path), Duration::from_millis(50));
        let start = Instant::now();
        let error = hasty.delete_network(Guid::random()).unwrap_err();
        assert!(start.elapsed() < DEADLINE / 2);
        assert_eq!(error.class(), Class::Unavailable, "{error}");

        *answers.held.lock().unwrap() = false;
        answers.let_go.notify_all();
        assert_eq!(waiting.join().unwrap(), Ok(()));
    }

    #[test]
    fn a_stopped_service_is_unavailable_and_found_again() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("hns.sock");
        let hcn = RemoteHcn::new(Address::Unix(path.clone()), DEADLINE);
        assert_eq!(hcn.version().unwrap_err().class(), Class::Unavailable);

        // A service that disconnects after one answer, twice.
        for round in 0..2 {
            let listener = UnixListener::bind(&path).unwrap();
            let one = thread::spawn(move || {
                let (mut stream, _) = listener.accept().unwrap();
                let call = read_call(&mut stream).unwrap().unwrap();
                let (answers, _calls) = Answers::new();
                write_answer(&mut stream, &answers.call(&call).into()).unwrap();
            });
            // The second round starts with the dead connection of the first: a read is sent again over a new one.
            assert_eq!(hcn.version(), Ok(Version::new(15, 4)), "round {round}");
            one.join().unwrap();
            std::fs::remove_file(&path).unwrap();
        }
        // A call that changes something is not repeated, because it may have been done.
        let error = hcn.delete_network(Guid::random()).unwrap_err();
        assert_eq!(error.class(), Class::Unavailable);
    }

    #[test]
    fn a_failure_to_accept_one_client_does_not_end_the_service() {
        let (answers, _calls) = Answers::new();
        let hcn: Arc<dyn Hcn> = answers;
        let (mut client, served) = UnixStream::pair().unwrap();
        client.set_read_timeout(Some(DEADLINE)).unwrap();
        // Too many open files, an aborted connection, a client, and finally a socket that does not listen.
        let mut accepts = vec![
            Err(io::Error::from_raw_os_error(24)),
            Err(io::Error::from(io::ErrorKind::ConnectionAborted)),
            Ok(served),
            Err(io::Error::from(io::ErrorKind::InvalidInput)),
        ]
        .into_iter();
        let ended = serve(|| accepts.next().unwrap(), &hcn).unwrap_err();
        assert_eq!(ended.kind(), io::ErrorKind::InvalidInput);
        crate::wire::write_call(&mut client, &Call::Version).unwrap();
        let answer = crate::wire::read_answer(&mut client).unwrap();
        assert_eq!(Result::from(answer), Ok(r#"{"Major":15,"Minor":4}"#.to_owned()));
    }

    #[test]
    fn invalid_bytes_close_only_their_connection() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("hns.sock");
        let (answers, _calls) = Answers::new();
        spawn_unix(UnixListener::bind(&path).unwrap(), answers).unwrap();
        for nonsense in [&b"\xff\xff\xff\xff"[..], b"\0\0\0\x02{]", b"\0\0\0\x09short"] {
            let mut stream = UnixStream::connect(&path).unwrap();
            stream.set_read_timeout(Some(DEADLINE)).unwrap();
            stream.write_all(nonsense).unwrap();
            stream.shutdown(std::net::Shutdown::Write).unwrap();
            let mut rest = Vec::new();
            // A reset or the end of the stream, but no answer.
            let _ = stream.read_to_end(&mut rest);
            assert!(rest.is_empty());
        }
        let call = Call::Query { kind: Kind::Network, id: Guid::ZERO, query: String::new() };
        let hcn = RemoteHcn::new(Address::Unix(path), DEADLINE);
        assert_eq!(hcn.call(&call).unwrap_err().code, HResult::HCN_E_NETWORK_NOT_FOUND);
    }
}
