//go:build windows

// Command functions calls the functions of computenetwork.dll that hcsshim does not use, on the endpoint that its argument names, and
// prints what they return, one a line.
package main

import (
	"encoding/json"
	"fmt"
	"os"
	"syscall"
	"time"
	"unsafe"
)

var library = syscall.NewLazyDLL("computenetwork.dll")

const (
	eHandle     = 0x80070006
	portExists  = 0x803b0013
	patience    = 20 * time.Second
	protocolTCP = 1
	exclusive   = 1
)

// portRange is HCN_PORT_RANGE_RESERVATION.
type portRange struct {
	Starting, Ending uint16
}

// portEntry is HCN_PORT_RANGE_ENTRY.
type portEntry struct {
	Owner, Target                               [16]byte
	Protocol                                    uint32
	Priority                                    uint64
	ReservationType, SharingFlags, DeliveryMode uint32
	Starting, Ending                            uint16
}

// notification is what a callback gets.
type notification struct {
	Context uintptr
	Type    uint32
	Data    json.RawMessage
}

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

// refused ends the program unless the function fails with this code.
func refused(name string, expected uint32, arguments ...uintptr) {
	code, _, _ := library.NewProc(name).Call(arguments...)
	if uint32(code) != expected {
		fail("%s: %#x instead of %#x", name, uint32(code), expected)
	}
}

func show(value any) {
	text, err := json.Marshal(value)
	if err != nil {
		fail("%v: %v", value, err)
	}
	fmt.Println(string(text))
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
	refused("HcnCloseService", eHandle, service)
	guests()
}

// guests tries callbacks and reservations of ports with two guest network services.
func guests() {
	var record *uint16
	ids := []*[16]byte{guid("6b4d1f1c-6f0a-4c52-9d0e-3f2c8f3f9a01"), guid("6b4d1f1c-6f0a-4c52-9d0e-3f2c8f3f9a02")}
	machine := `{"VirtualMachineId":"6b4d1f1c-6f0a-4c52-9d0e-3f2c8f3f9a03"}`
	handles := make([]uintptr, len(ids))
	for i, id := range ids {
		call("HcnCreateGuestNetworkService", &record, place(id), uintptr(wide(machine)), place(&handles[i]), place(&record))
	}
	callbacks(handles[0], handles[1])
	ports(handles[0], handles[1])
	for i, id := range ids {
		call("HcnCloseGuestNetworkService", nil, handles[i])
		call("HcnDeleteGuestNetworkService", &record, place(id), place(&record))
	}
	var registration uintptr
	refused("HcnRegisterGuestNetworkServiceCallback", eHandle, handles[0], callback(nil), 1, place(&registration))
}

func callback(got chan notification) uintptr {
	return syscall.NewCallback(func(kind, context, status uintptr, data *uint16) uintptr {
		got <- notification{context, uint32(kind), json.RawMessage(text(data))}
		return 0
	})
}

// callbacks registers for one service, and prints the notifications of changes of both: only its own arrive, and none after the end.
func callbacks(one, other uintptr) {
	got := make(chan notification, 16)
	called := callback(got)
	change := func(service uintptr, state string) {
		var record *uint16
		settings := fmt.Sprintf(`{"ResourceType":"State","RequestType":"Update","Settings":{"State":%q}}`, state)
		call("HcnModifyGuestNetworkService", &record, service, uintptr(wide(settings)), place(&record))
	}
	var all []notification
	next := func() {
		select {
		case each := <-got:
			all = append(all, each)
		case <-time.After(patience):
			fail("no notification after %v", all)
		}
	}
	var first, second uintptr
	call("HcnRegisterGuestNetworkServiceCallback", nil, one, called, 1, place(&first))
	change(other, "Paused")
	change(one, "Paused")
	next()
	call("HcnRegisterGuestNetworkServiceCallback", nil, one, called, 2, place(&second))
	call("HcnUnregisterGuestNetworkServiceCallback", nil, first)
	change(one, "Synchronized")
	next()
	call("HcnUnregisterGuestNetworkServiceCallback", nil, second)
	show(all)
}

// ports reserves ports for both services, prints the list of reservations, and releases them.
func ports(one, other uintptr) {
	var port, several uintptr
	var taken portRange
	call("HcnReserveGuestNetworkServicePort", nil, one, protocolTCP, exclusive, 80, place(&port))
	refused("HcnReserveGuestNetworkServicePort", portExists, other, protocolTCP, exclusive, 80, place(&several))
	call("HcnReserveGuestNetworkServicePortRange", nil, other, 9, place(&taken), place(&several))
	show(taken)
	show(reservations())
	for _, handle := range []uintptr{port, several} {
		call("HcnReleaseGuestNetworkServicePortReservationHandle", nil, handle)
	}
	refused("HcnReleaseGuestNetworkServicePortReservationHandle", eHandle, port)
	show(reservations())
}

// reservations returns what the library lists, and frees the library's list.
func reservations() []portEntry {
	var count uint32
	var first *portEntry
	call("HcnEnumerateGuestNetworkPortReservations", nil, place(&count), place(&first))
	all := append([]portEntry{}, unsafe.Slice(first, count)...)
	library.NewProc("HcnFreeGuestNetworkPortReservations").Call(uintptr(unsafe.Pointer(first)))
	return all
}
