//go:build windows

// Command functions calls the functions of computenetwork.dll that hcsshim does not use, on the endpoint that its argument names, and
// prints what they return, one a line.
package main

import (
	"fmt"
	"os"
	"syscall"
	"unsafe"
)

var library = syscall.NewLazyDLL("computenetwork.dll")

const eHandle = 0x80070006

func guid(text string) *[16]byte {
	var bytes [16]byte
	var a uint32
	var b, c uint16
	var rest [8]byte
	n, err := fmt.Sscanf(text, "%08x-%04x-%04x-%02x%02x-%02x%02x%02x%02x%02x%02x", &a, &b, &c, &rest[0], &rest[1], &rest[2],
		&rest[3], &rest[4], &rest[5], &rest[6], &rest[7])
	if err != nil || n != 11 {
		fail("%q is no identifier: %v", text, err)
	}
	*(*uint32)(unsafe.Pointer(&bytes[0])) = a
	*(*uint16)(unsafe.Pointer(&bytes[4])) = b
	*(*uint16)(unsafe.Pointer(&bytes[6])) = c
	copy(bytes[8:], rest[:])
	return &bytes
}

func fail(format string, values ...any) {
	fmt.Fprintf(os.Stderr, format+"\n", values...)
	os.Exit(1)
}

func wide(text string) unsafe.Pointer {
	units, err := syscall.UTF16PtrFromString(text)
	if err != nil {
		fail("%q: %v", text, err)
	}
	return unsafe.Pointer(units)
}

func text(units *uint16) string {
	if units == nil {
		return ""
	}
	var all []uint16
	for at := unsafe.Pointer(units); *(*uint16)(at) != 0; at = unsafe.Add(at, 2) {
		all = append(all, *(*uint16)(at))
	}
	return syscall.UTF16ToString(all)
}

// call ends the program if the function fails, or leaves an error record.
func call(name string, record **uint16, arguments ...uintptr) {
	code, _, _ := library.NewProc(name).Call(arguments...)
	if uint32(code) != 0 || (record != nil && *record != nil) {
		problem := ""
		if record != nil {
			problem = text(*record)
		}
		fail("%s: %#x %s", name, uint32(code), problem)
	}
}

func place[T any](value *T) uintptr {
	return uintptr(unsafe.Pointer(value))
}

func main() {
	if len(os.Args) != 2 {
		fail("usage: functions ENDPOINT")
	}
	var record, answer *uint16
	var service, endpoint, guest uintptr
	call("HcnOpenService", &record, place(&service), place(&record))
	call("HcnOpenEndpoint", &record, place(guid(os.Args[1])), place(&endpoint), place(&record))
	for _, name := range []string{"HcnQueryEndpointStats", "HcnQueryEndpointAddresses"} {
		call(name, &record, endpoint, uintptr(wide("")), place(&answer), place(&record))
		fmt.Println(text(answer))
	}
	call("HcnCloseEndpoint", nil, endpoint)

	id := guid("6b4d1f1c-6f0a-4c52-9d0e-3f2c8f3f9a01")
	call("HcnCreateGuestNetworkService", &record, place(id), uintptr(wide(`{"Name":"g","MirrorHostNetworking":true}`)),
		place(&guest), place(&record))
	change := `{"ResourceType":"State","RequestType":"Update","Settings":{"State":"Synchronized"}}`
	call("HcnModifyGuestNetworkService", &record, guest, uintptr(wide(change)), place(&record))
	call("HcnCloseGuestNetworkService", nil, guest)
	call("HcnEnumerateGuestNetworkServices", &record, uintptr(wide("")), place(&answer), place(&record))
	fmt.Println(text(answer))
	call("HcnOpenGuestNetworkService", &record, place(id), place(&guest), place(&record))
	call("HcnQueryGuestNetworkServiceProperties", &record, guest, uintptr(wide("")), place(&answer), place(&record))
	fmt.Println(text(answer))
	call("HcnCloseGuestNetworkService", nil, guest)
	call("HcnDeleteGuestNetworkService", &record, place(id), place(&record))
	call("HcnCloseService", nil, service)
	code, _, _ := library.NewProc("HcnCloseService").Call(service)
	if uint32(code) != eHandle {
		fail("a handle of the service was closed twice: %#x", uint32(code))
	}
}
