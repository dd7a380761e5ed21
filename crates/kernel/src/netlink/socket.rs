//! A synchronous netlink socket.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use super::message::{
    Incoming, Meaning, NLM_F_ACK, NLM_F_DUMP, NLM_F_DUMP_INTR, Refusal, Reply, Request, split,
};
use crate::sys::{bind, netlink_port, set_option, socket};
use crate::{Error, Result};

/// The part of the kernel to talk to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Family {
    /// Links, addresses, routes, neighbours (`rtnetlink(7)`).
    Route,
    /// nftables, conntrack, nflog (`linux/netfilter/nfnetlink.h`).
    Netfilter,
}

/// A socket to one network namespace: that of the thread that opened it.
#[derive(Debug)]
pub struct Socket {
    socket: OwnedFd,
    sequence: u32,
    buffer: Buffer,
    send_buffer: usize,
    port: u32,
}

/// The requested buffer sizes in bytes; the kernel doubles them. 100,000 set elements are a transaction of about 3
/// MB, which must fit in one send.
const WANTED_BUFFER: i32 = 16 << 20;

/// The kernel sends dumps in pieces of at most 32 KiB, and larger single objects separately.
const RECEIVE_BUFFER: usize = 256 << 10;

/// How many receive buffers are kept for the next sockets.
const MAX_SPARE: usize = 8;

/// Receive buffers that no socket uses. Many sockets live for one call only, and with the C library of the image, memory of this
/// size from the system costs each of them more than its requests do.
static SPARE: Mutex<Vec<Vec<u8>>> = Mutex::new(Vec::new());

/// A receive buffer, which the next socket uses again.
#[derive(Debug)]
struct Buffer(Vec<u8>);

impl Buffer {
    fn new() -> Self {
        let spare = SPARE.lock().unwrap_or_else(PoisonError::into_inner).pop();
        Self(spare.unwrap_or_else(|| vec![0; RECEIVE_BUFFER]))
    }

    fn room(&mut self) -> &mut [u8] {
        &mut self.0
    }

    /// The bytes that were received.
    fn first(&self, length: usize) -> &[u8] {
        &self.0[..length]
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let mut spare = SPARE.lock().unwrap_or_else(PoisonError::into_inner);
        if spare.len() < MAX_SPARE {
            spare.push(std::mem::take(&mut self.0));
        }
    }
}

/// The number of messages sent at once. Their answers must fit in the receive buffer even if all are refused.
const BATCH: usize = 500;

/// How often a dump is restarted when the objects change meanwhile.
const DUMP_ATTEMPTS: u32 = 20;
/// The first pause before a restart. Each further pause is longer by as much, 190 ms in total, because others change
/// nftables in bursts.
const DUMP_PAUSE: Duration = Duration::from_millis(1);

impl Socket {
    /// Opens a socket in the network namespace of the calling thread.
    ///
    /// # Errors
    /// The call that failed.
    pub fn open(family: Family) -> Result<Self> {
        let failed = |operation| Error::system(operation, format!("{family:?} netlink socket"));
        let protocol = match family {
            Family::Route => libc::NETLINK_ROUTE,
            Family::Netfilter => libc::NETLINK_NETFILTER,
        };
        let socket = socket(libc::AF_NETLINK, libc::SOCK_RAW, protocol).map_err(failed("open it"))?;
        let option = |name| set_option(socket.as_fd(), libc::SOL_NETLINK, name, 1);
        option(libc::NETLINK_EXT_ACK).map_err(failed("ask for the kernel's messages"))?;
        option(libc::NETLINK_CAP_ACK).map_err(failed("ask for short answers"))?;
        option(libc::NETLINK_GET_STRICT_CHK).map_err(failed("ask for strict checks"))?;
        // SAFETY: all zeroes is a valid sockaddr_nl, made of integers.
        let mut address: libc::sockaddr_nl = unsafe { std::mem::zeroed() };
        address.nl_family = libc::AF_NETLINK as u16;
        bind(socket.as_fd(), &address).map_err(failed("bind it"))?;
        let send_buffer = set_buffers(socket.as_fd()).map_err(failed("set its buffers"))?;
        let port = netlink_port(socket.as_fd()).map_err(failed("ask for its port id"))?;
        Ok(Self { socket, sequence: 0, buffer: Buffer::new(), send_buffer, port })
    }

    /// Subscribes to changes of these kinds (`RTNLGRP_…`, `NFNLGRP_…`); read them by
    /// [`notifications`](Self::notifications). Use a separate socket for this.
    ///
    /// # Errors
    /// An error of the kernel.
    pub fn subscribe(&self, groups: &[u32]) -> Result<()> {
        for group in groups {
            let joined = set_option(
                self.as_fd(),
                libc::SOL_NETLINK,
                libc::NETLINK_ADD_MEMBERSHIP,
                group.cast_signed(),
            );
            joined.map_err(Error::system("subscribe", format!("netlink group {group}")))?;
        }
        Ok(())
    }

    /// The waiting changes, without blocking. The socket becomes readable when there are some.
    ///
    /// # Errors
    /// `ENOBUFS` if the kernel had to drop some: read the whole state again.
    pub fn notifications(&mut self) -> io::Result<Vec<Reply>> {
        let mut replies = Vec::new();
        while let Some(length) = receive(&self.socket, self.buffer.room(), libc::MSG_DONTWAIT)? {
            replies.extend(split(self.buffer.first(length)).map(reply));
        }
        Ok(replies)
    }

    /// The changes in the next datagram; waits at most this long, and returns none if none arrived.
    ///
    /// # Errors
    /// As [`notifications`](Self::notifications).
    pub fn next_notifications(&mut self, patience: Duration) -> io::Result<Vec<Reply>> {
        rustix::net::sockopt::set_socket_timeout(
            &self.socket,
            rustix::net::sockopt::Timeout::Recv,
            Some(patience),
        )?;
        let length = receive(&self.socket, self.buffer.room(), 0)?;
        Ok(length.map(|length| split(self.buffer.first(length)).map(reply).collect()).unwrap_or_default())
    }

    /// Sends messages one after another with as few system calls as possible, and returns the kernel's result for
    /// each. A refusal does not prevent the next message from being tried.
    ///
    /// # Errors
    /// The socket failed, and it is unknown which messages were accepted.
    pub fn batch(&mut self, requests: &[Request]) -> io::Result<Vec<Result<(), Refusal>>> {
        let mut results: Vec<_> = requests.iter().map(|_| Ok(())).collect();
        let mut from = 0;
        while from < requests.len() {
            let to = from + self.fitting(&requests[from..]);
            self.exchange(&requests[from..to], &mut results[from..to])?;
            from = to;
        }
        Ok(results)
    }

    /// Sends one message.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub fn request(&mut self, request: &Request) -> Result<(), Refusal> {
        self.batch(std::slice::from_ref(request))?.pop().unwrap_or(Ok(()))
    }

    /// Requests one object, and returns the kernel's messages about it.
    ///
    /// # Errors
    /// The kernel's refusal, such as `ENODEV` for a missing link.
    pub fn get(&mut self, request: &Request) -> Result<Vec<Reply>, Refusal> {
        self.sequence = self.sequence.wrapping_add(1);
        let mut data = Vec::with_capacity(request.length());
        request.write(&mut data, NLM_F_ACK, self.sequence);
        self.send(&data)?;
        let mut replies = Vec::new();
        loop {
            let Some(length) = receive(&self.socket, self.buffer.room(), 0)? else { continue };
            for message in
                split(self.buffer.first(length)).filter(|message| message.sequence == self.sequence)
            {
                match message.meaning() {
                    Meaning::Object => replies.push(reply(message)),
                    Meaning::Done => return Ok(replies),
                    Meaning::Refused(refusal) => return Err(refusal),
                }
            }
        }
    }

    /// Requests all objects of a kind. Restarts if they change meanwhile, so that none is missing or duplicated.
    ///
    /// # Errors
    /// The kernel's refusal; `EINTR` if the objects kept changing.
    pub fn dump(&mut self, request: &Request) -> Result<Vec<Reply>, Refusal> {
        for attempt in 0..DUMP_ATTEMPTS {
            std::thread::sleep(DUMP_PAUSE * attempt);
            if let Some(replies) = self.dump_once(request)? {
                return Ok(replies);
            }
        }
        Err(io::Error::from_raw_os_error(libc::EINTR).into())
    }

    /// Sends messages that the kernel handles as one transaction, and returns its results with the indices of their
    /// messages. Messages must not request answers except by their own flags.
    ///
    /// # Errors
    /// `EMSGSIZE` if they do not fit in the send buffer; the kernel has then seen none of them.
    pub fn transaction(&mut self, requests: &[Request]) -> io::Result<Vec<(usize, Result<(), Refusal>)>> {
        let first = self.sequence.wrapping_add(1);
        let mut data = Vec::with_capacity(requests.iter().map(Request::length).sum());
        for request in requests {
            self.sequence = self.sequence.wrapping_add(1);
            request.write(&mut data, 0, self.sequence);
        }
        self.send(&data)?;
        // The kernel works while it accepts the message, so all results exist when send returns.
        let mut answers = Vec::new();
        while let Some(length) = receive(&self.socket, self.buffer.room(), libc::MSG_DONTWAIT)? {
            for message in split(self.buffer.first(length)) {
                let index = message.sequence.wrapping_sub(first) as usize;
                if index >= requests.len() {
                    continue;
                }
                match message.meaning() {
                    Meaning::Done => answers.push((index, Ok(()))),
                    Meaning::Refused(refusal) => answers.push((index, Err(refusal))),
                    Meaning::Object => {}
                }
            }
        }
        Ok(answers)
    }

    /// The socket's port id in this network namespace.
    pub(crate) fn port(&self) -> u32 {
        self.port
    }

    /// The maximum size of one send in bytes.
    pub(crate) fn send_limit(&self) -> usize {
        self.send_buffer
    }

    /// The number of these messages that fit in one call; at least one.
    fn fitting(&self, requests: &[Request]) -> usize {
        let ends = requests.iter().scan(0, |end, request| {
            *end += request.length();
            Some(*end)
        });
        ends.take(BATCH).take_while(|end| *end <= self.send_buffer).count().max(1)
    }

    /// Sends messages in one call and collects the results. Only the last one requests an answer: the kernel answers
    /// in order, and reports refusals in any case.
    fn exchange(&mut self, requests: &[Request], results: &mut [Result<(), Refusal>]) -> io::Result<()> {
        let first = self.sequence.wrapping_add(1);
        let mut data = Vec::with_capacity(requests.iter().map(Request::length).sum());
        for (index, request) in requests.iter().enumerate() {
            self.sequence = self.sequence.wrapping_add(1);
            let flags = if index + 1 == requests.len() { NLM_F_ACK } else { 0 };
            request.write(&mut data, flags, self.sequence);
        }
        self.send(&data)?;
        loop {
            let Some(length) = receive(&self.socket, self.buffer.room(), 0)? else { continue };
            for message in split(self.buffer.first(length)) {
                let index = message.sequence.wrapping_sub(first) as usize;
                let Some(result) = results.get_mut(index) else { continue };
                match message.meaning() {
                    Meaning::Object => continue,
                    Meaning::Done => {}
                    Meaning::Refused(refusal) => *result = Err(refusal),
                }
                if index + 1 == requests.len() {
                    return Ok(());
                }
            }
        }
    }

    /// One attempt; `None` if the objects changed meanwhile.
    fn dump_once(&mut self, request: &Request) -> Result<Option<Vec<Reply>>, Refusal> {
        let mut replies = Vec::new();
        let quiet = self.stream(request, &mut |reply| {
            replies.push(reply);
            true
        })?;
        Ok(quiet.then_some(replies))
    }

    /// Requests all objects of a kind, passes them on as they arrive, and returns whether they were unchanged
    /// meanwhile. If `take` returns false, the rest stays unread, and the socket can be used for nothing else.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub(crate) fn stream(
        &mut self,
        request: &Request,
        take: &mut dyn FnMut(Reply) -> bool,
    ) -> Result<bool, Refusal> {
        self.sequence = self.sequence.wrapping_add(1);
        let mut data = Vec::with_capacity(request.length());
        request.write(&mut data, NLM_F_DUMP, self.sequence);
        self.send(&data)?;
        let mut quiet = true;
        loop {
            let Some(length) = receive(&self.socket, self.buffer.room(), 0)? else { continue };
            for message in
                split(self.buffer.first(length)).filter(|message| message.sequence == self.sequence)
            {
                quiet &= message.flags & NLM_F_DUMP_INTR == 0;
                match message.meaning() {
                    Meaning::Object if take(reply(message)) => {}
                    Meaning::Object | Meaning::Done => return Ok(quiet),
                    Meaning::Refused(refusal) if refusal.source.raw_os_error() == Some(libc::EINTR) => {
                        return Ok(false);
                    }
                    Meaning::Refused(refusal) => return Err(refusal),
                }
            }
        }
    }

    fn send(&self, data: &[u8]) -> io::Result<()> {
        // SAFETY: the kernel reads `data.len()` bytes of `data`.
        let sent = unsafe { libc::send(self.socket.as_raw_fd(), data.as_ptr().cast(), data.len(), 0) };
        if sent < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// Requests large buffers, beyond the system's limits if that is allowed (CAP_NET_ADMIN outside of user namespaces),
/// and returns a message size that certainly fits in the send buffer.
fn set_buffers(socket: BorrowedFd<'_>) -> io::Result<usize> {
    for (force, plain) in [(libc::SO_SNDBUFFORCE, libc::SO_SNDBUF), (libc::SO_RCVBUFFORCE, libc::SO_RCVBUF)] {
        set_option(socket, libc::SOL_SOCKET, force, WANTED_BUFFER)
            .or_else(|_| set_option(socket, libc::SOL_SOCKET, plain, WANTED_BUFFER))?;
    }
    let given = rustix::net::sockopt::socket_send_buffer_size(socket)?;
    // The kernel doubles the size for its own overhead; netlink accepts all but 32 bytes of it.
    Ok(given.saturating_sub(1024))
}

/// Receives one datagram; `None` if none waits and the flags say not to block.
fn receive(socket: &OwnedFd, buffer: &mut [u8], flags: libc::c_int) -> io::Result<Option<usize>> {
    loop {
        let (at, room) = (buffer.as_mut_ptr().cast(), buffer.len());
        // SAFETY: the kernel writes at most `room` bytes into the buffer.
        let length = unsafe { libc::recv(socket.as_raw_fd(), at, room, flags | libc::MSG_TRUNC) };
        match usize::try_from(length) {
            // No message of the kernel is that long; the end of a longer one would be missing.
            Ok(length) if length > room => return Err(io::Error::from_raw_os_error(libc::EMSGSIZE)),
            Ok(length) => return Ok(Some(length)),
            Err(_) => match io::Error::last_os_error() {
                error if error.kind() == io::ErrorKind::WouldBlock => return Ok(None),
                error if error.kind() == io::ErrorKind::Interrupted => {}
                error => return Err(error),
            },
        }
    }
}

fn reply(message: Incoming<'_>) -> Reply {
    Reply { kind: message.kind, port: message.port, payload: message.payload.to_vec() }
}
