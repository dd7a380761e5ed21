//! Listens for the CNI plugin and operators ([`tortie_cni::local`]): on Unix sockets, and on named pipes on Windows.

pub(crate) use system::{Listener, Stream, make_folder_of, path_of_lock, private};

#[cfg(unix)]
mod system {
    use std::fs::{DirBuilder, OpenOptions, Permissions};
    use std::io;
    use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
    use std::path::{Path, PathBuf};

    use tokio::net::UnixListener;

    pub(crate) use tokio::net::UnixStream as Stream;

    /// A socket for the agent's own user.
    pub(crate) struct Listener {
        listener: UnixListener,
        path: PathBuf,
        own: Option<(u64, u64)>,
    }

    impl Listener {
        /// Creates the socket. An abandoned one is replaced in one step, so a client finds a file at every moment.
        pub(crate) fn bind(path: &Path) -> io::Result<Self> {
            make_folder_of(path)?;
            let new = path.with_added_extension("new");
            match std::fs::remove_file(&new) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
            let listener = UnixListener::bind(&new)?;
            std::fs::set_permissions(&new, Permissions::from_mode(0o600))?;
            let own = inode(&new);
            std::fs::rename(&new, path)?;
            Ok(Self { listener, path: path.to_owned(), own })
        }

        /// The next connection.
        pub(crate) async fn accept(&mut self) -> io::Result<Stream> {
            self.listener.accept().await.map(|(stream, _)| stream)
        }

        /// Whether clients find it: nobody has removed or replaced the socket.
        pub(crate) fn is_there(&self) -> bool {
            self.own.is_some() && inode(&self.path) == self.own
        }
    }

    /// The file of a socket.
    fn inode(socket: &Path) -> Option<(u64, u64)> {
        std::fs::symlink_metadata(socket).ok().map(|file| (file.dev(), file.ino()))
    }

    /// Creates the folder of a socket, for the agent's own user. One that is named for Tortie is closed for others also if somebody
    /// else has created it, such as a kubelet for the volume of the agent's pod.
    pub(crate) fn make_folder_of(socket: &Path) -> io::Result<()> {
        let Some(folder) = socket.parent() else { return Ok(()) };
        DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
        if folder.file_name().is_some_and(|name| name == "tortie") {
            std::fs::set_permissions(folder, Permissions::from_mode(0o700))?;
        }
        Ok(())
    }

    /// The file whose lock the agent of a socket holds.
    pub(crate) fn path_of_lock(socket: &Path) -> PathBuf {
        socket.with_added_extension("lock")
    }

    /// Lets a new file be the agent's own.
    pub(crate) fn private(options: &mut OpenOptions) -> &mut OpenOptions {
        options.mode(0o600)
    }

    #[cfg(test)]
    mod tests {
        use super::*;

        #[tokio::test]
        async fn a_socket_is_replaced_while_clients_always_find_one() {
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("agent.sock");
            let _first = Listener::bind(&path).unwrap();
            let stop = std::sync::atomic::AtomicBool::new(false);
            std::thread::scope(|threads| {
                let reader = threads.spawn(|| {
                    while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                        let mode = std::fs::symlink_metadata(&path).unwrap().mode() & 0o777;
                        assert_eq!(mode, 0o600, "the socket of the agent's own user");
                    }
                });
                for _ in 0..2_000 {
                    let replaced = Listener::bind(&path).unwrap();
                    assert!(replaced.is_there());
                }
                stop.store(true, std::sync::atomic::Ordering::Relaxed);
                reader.join().unwrap();
            });
        }

        #[test]
        fn folders_that_are_named_for_tortie_are_closed_for_others() {
            let parent = tempfile::tempdir().unwrap();
            for (name, exists, mode) in [
                ("tortie", true, 0o700),
                ("tortie", false, 0o700),
                ("run", true, 0o755),
                ("run", false, 0o700),
            ] {
                let folder = parent.path().join(format!("{name}-{exists}")).join(name);
                if exists {
                    std::fs::create_dir_all(&folder).unwrap();
                    std::fs::set_permissions(&folder, Permissions::from_mode(0o755)).unwrap();
                }
                make_folder_of(&folder.join("agent.sock")).unwrap();
                let found = std::fs::metadata(&folder).unwrap().mode() & 0o777;
                assert_eq!(found, mode, "{name}, {exists}");
            }
        }
    }
}

#[cfg(windows)]
mod system {
    use std::fs::OpenOptions;
    use std::io;
    use std::path::{Path, PathBuf};

    use tokio::net::windows::named_pipe::ServerOptions;
    use tortie_cni::local;

    pub(crate) use tokio::net::windows::named_pipe::NamedPipeServer as Stream;

    /// A named pipe for administrators and the system.
    pub(crate) struct Listener {
        path: PathBuf,
        /// The instance for the next client.
        next: Stream,
    }

    impl Listener {
        /// Creates the pipe. It fails if another process has created it.
        pub(crate) fn bind(path: &Path) -> io::Result<Self> {
            let mut options = ServerOptions::new();
            let next =
                options.first_pipe_instance(true).reject_remote_clients(true).write_dac(true).create(path)?;
            // All instances share the access list.
            tortie_hcn::native::restrict_pipe(&next)?;
            Ok(Self { path: path.to_owned(), next })
        }

        /// The next connection. It may be cancelled.
        pub(crate) async fn accept(&mut self) -> io::Result<Stream> {
            let connected = self.next.connect().await;
            // A client that is gone again has used the instance up, too.
            let next = ServerOptions::new().reject_remote_clients(true).create(&self.path)?;
            let stream = std::mem::replace(&mut self.next, next);
            connected.map(|()| stream)
        }

        /// Nobody can remove a pipe that has an instance.
        pub(crate) fn is_there(&self) -> bool {
            true
        }
    }

    /// Creates the folder of the lock of a pipe.
    pub(crate) fn make_folder_of(_: &Path) -> io::Result<()> {
        local::make_folder(&local::state_folder())
    }

    /// The file whose lock the agent of a pipe holds.
    pub(crate) fn path_of_lock(pipe: &Path) -> PathBuf {
        let name = pipe.file_name().unwrap_or(pipe.as_os_str());
        local::state_folder().join(name).with_added_extension("lock")
    }

    /// The folder's access list applies.
    pub(crate) fn private(options: &mut OpenOptions) -> &mut OpenOptions {
        options
    }
}
