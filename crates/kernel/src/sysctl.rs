//! Kernel parameters of the calling thread's network namespace, through `/proc/sys`.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use crate::{Error, Result};

/// Where a container may have the node's `/proc/sys/net` in a form that it may write to; its own is read-only. The kernel
/// shows the parameters of the reader's network namespace in both.
const WRITABLE: &str = "/host/proc/sys";

/// Sets a parameter, and returns whether it had another value. The name is written with slashes, such as
/// `net/ipv4/conf/vxlan.calico/rp_filter`, because interface names may contain dots.
///
/// # Errors
/// The file in `/proc/sys` that could not be read or written: it is missing if the kernel lacks the feature, and
/// read-only in a container that has neither privileges nor the folder `/host/proc/sys/net`.
pub fn ensure(name: &str, value: &str) -> Result<bool> {
    let file = file(name);
    if read_file(&file)? == value {
        return Ok(false);
    }
    let written = match fs::write(&file, value) {
        Err(error) if error.kind() == io::ErrorKind::ReadOnlyFilesystem => {
            fs::write(Path::new(WRITABLE).join(name), value).map_err(|_| error)
        }
        written => written,
    };
    written.map_err(Error::system("write the kernel parameter", file.display().to_string()))?;
    tracing::debug!(parameter = name, value, "set a kernel parameter");
    Ok(true)
}

/// Reads a parameter, without the final newline.
///
/// # Errors
/// The file in `/proc/sys` that could not be read.
pub fn read(name: &str) -> Result<String> {
    read_file(&file(name))
}

/// Whether the kernel has a parameter.
#[must_use]
pub fn exists(name: &str) -> bool {
    file(name).exists()
}

fn file(name: &str) -> PathBuf {
    Path::new("/proc/sys").join(name)
}

fn read_file(file: &Path) -> Result<String> {
    let text = fs::read_to_string(file);
    let text = text.map_err(Error::system("read the kernel parameter", file.display().to_string()))?;
    Ok(text.trim_end().to_owned())
}
