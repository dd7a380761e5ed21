//! Folders and access lists of what only administrators and the system may use.

use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::os::windows::ffi::OsStringExt;
use std::os::windows::fs::OpenOptionsExt;
use std::os::windows::io::{AsHandle, AsRawHandle, BorrowedHandle};
use std::path::{Path, PathBuf};

use windows_sys::Win32::Foundation::LocalFree;
use windows_sys::Win32::Security::Authorization::{
    ConvertStringSecurityDescriptorToSecurityDescriptorW, SDDL_REVISION_1, SE_FILE_OBJECT, SE_KERNEL_OBJECT,
    SE_OBJECT_TYPE, SetSecurityInfo,
};
use windows_sys::Win32::Security::{
    ACL, DACL_SECURITY_INFORMATION, GetSecurityDescriptorDacl, PROTECTED_DACL_SECURITY_INFORMATION,
};
use windows_sys::Win32::Storage::FileSystem::{FILE_FLAG_BACKUP_SEMANTICS, READ_CONTROL, WRITE_DAC};
use windows_sys::Win32::System::Com::CoTaskMemFree;
use windows_sys::Win32::UI::Shell::{FOLDERID_ProgramData, SHGetKnownFolderPath};

/// Nothing is inherited; administrators and the system may do everything, also with what is created inside.
const ADMINISTRATORS: &str = "D:P(A;OICI;GA;;;BA)(A;OICI;GA;;;SY)";

/// Lets only administrators and the system connect to a named pipe. The handle needs the right to change the access list.
///
/// # Errors
/// The system refuses.
pub fn restrict_pipe(pipe: &impl AsHandle) -> io::Result<()> {
    restrict(pipe.as_handle(), SE_KERNEL_OBJECT)
}

/// Lets only administrators and the system use a folder and what is in it.
///
/// # Errors
/// The system refuses, or there is no such folder.
pub fn restrict_folder(path: &Path) -> io::Result<()> {
    let mut options = File::options();
    let folder = options.access_mode(READ_CONTROL | WRITE_DAC).custom_flags(FILE_FLAG_BACKUP_SEMANTICS);
    restrict(folder.open(path)?.as_handle(), SE_FILE_OBJECT)
}

/// The folder for data of programs. Unlike the variable `ProgramData`, whoever starts the process does not choose it.
pub fn program_data() -> PathBuf {
    let mut path = std::ptr::null_mut();
    // SAFETY: the folder's identifier lives longer than the call; no user is named; the result is a place for a pointer.
    let code = unsafe { SHGetKnownFolderPath(&FOLDERID_ProgramData, 0, std::ptr::null_mut(), &raw mut path) };
    let mut units = Vec::new();
    if code >= 0 && !path.is_null() {
        // SAFETY: the text ends with NUL, and nothing behind it is read.
        while let unit @ 1.. = unsafe { *path.add(units.len()) } {
            units.push(unit);
        }
    }
    // SAFETY: the text was allocated for the caller, and is freed once; null is allowed.
    unsafe { CoTaskMemFree(path.cast()) };
    if units.is_empty() { r"C:\ProgramData".into() } else { OsString::from_wide(&units).into() }
}

fn restrict(object: BorrowedHandle<'_>, kind: SE_OBJECT_TYPE) -> io::Result<()> {
    let text: Vec<u16> = ADMINISTRATORS.encode_utf16().chain([0]).collect();
    let mut descriptor = std::ptr::null_mut();
    // SAFETY: the text ends with NUL; the result is a place for a pointer; nobody asks for the size.
    let converted = unsafe {
        ConvertStringSecurityDescriptorToSecurityDescriptorW(
            text.as_ptr(),
            SDDL_REVISION_1,
            &raw mut descriptor,
            std::ptr::null_mut(),
        )
    };
    if converted == 0 {
        return Err(io::Error::last_os_error());
    }
    let (mut present, mut list, mut is_default) = (0, std::ptr::null_mut::<ACL>(), 0);
    // SAFETY: the descriptor is valid; the results are places for their values.
    let found = unsafe {
        GetSecurityDescriptorDacl(descriptor, &raw mut present, &raw mut list, &raw mut is_default)
    };
    let result = if found == 0 || present == 0 {
        Err(io::Error::last_os_error())
    } else {
        // SAFETY: the handle is open, and the list, which is part of the descriptor, is valid until that is freed.
        let code = unsafe {
            SetSecurityInfo(
                object.as_raw_handle(),
                kind,
                DACL_SECURITY_INFORMATION | PROTECTED_DACL_SECURITY_INFORMATION,
                std::ptr::null_mut(),
                std::ptr::null_mut(),
                list,
                std::ptr::null_mut(),
            )
        };
        if code == 0 { Ok(()) } else { Err(io::Error::from_raw_os_error(code.cast_signed())) }
    };
    // SAFETY: the descriptor was allocated by the conversion, and is freed once.
    unsafe { LocalFree(descriptor) };
    result
}
